"""One rank's program: what lowering returns and the runtime runs.

Example:
    ```
    forward(*[tensor of name for name in inputs])                  -> [*mutations, *outputs, *kept, *saved]
    again(*[tensor of name for name in inputs], *kept)             -> [*mutations, *outputs, *saved]
    backward(*saved, *[forward input of name for name in saved_inputs], *tangents) -> [*gradients]
    ```
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True, slots=True)
class EmittedCollective:
    """One collective of the generated code, in execution order.

    Attributes:
        kind: ``all_gather``, ``all_reduce``, ``reduce_scatter`` or ``all_to_all``.
        axis: index of the mesh axis it runs over.
        phase: ``"forward"`` or ``"backward"``.
        shape: local shape of its input; equal on all ranks (uneven pieces are padded first).
        dtype: text of its element type, ``"float32"``.
        values: names of the values that it redistributes; more than one where a pass put several into one buffer. The
            plan counts every one of them: *logical* collectives.
    """

    kind: str
    axis: int
    phase: str
    shape: tuple[int, ...]
    dtype: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class LocalProgram:
    """The program of one rank: plain functions from local tensors to local tensors.

    Attributes:
        forward: called with the local tensors of ``inputs``; returns a tuple of ``mutations``, then ``outputs``, then
            ``kept`` and ``saved``.
        again: the forward that is given what an earlier one kept, and does not gather it again; None where nothing is kept.
        backward: called with ``saved``, then the forward inputs named by ``saved_inputs``, then the ``tangents``; returns a
            tuple of ``gradients``. None where the capture had no backward.
        inputs: value names of ``forward``'s arguments, in order: every placeholder of the capture except tangents
            (parameters, buffers, batch inputs, constants, seed), in the capture's order. All must be contiguous.
        mutations: FQNs of the buffers whose new values come first in ``forward``'s results.
        outputs: per user output of the capture, in order: its index in ``forward``'s results, or None where it is no tensor
            (see ``GraphOutput.constant``).
        kept: names of the gathered copies of parameters that live until the optimizer's next step. Each is all of a storage.
        saved: value names of the last ``len(saved)`` results of ``forward``. No two share a storage.
        saved_inputs: value names of the forward inputs that ``backward`` reads again.
        tangents: value names of the tangents, in order: one per differentiable output.
        gradients: names (parameter FQN or path of the batch input) of ``backward``'s results, in order. A parameter without
            a gradient does not occur. Each lies as its parameter does.
        input_shapes: local shape per name of ``inputs`` and ``tangents``.
        collectives: the collectives of both graphs, in execution order.
        sequence_hash: sha256 of the collective sequence (kind, axis, phase, shape, dtype): must be equal on all ranks.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[str, ...]
    mutations: tuple[str, ...]
    outputs: tuple[int | None, ...]
    saved: tuple[str, ...]
    saved_inputs: tuple[str, ...]
    tangents: tuple[str, ...]
    gradients: tuple[str, ...]
    input_shapes: dict[str, tuple[int, ...]]
    collectives: tuple[EmittedCollective, ...]
    sequence_hash: str
    again: fx.GraphModule | None = None
    kept: tuple[str, ...] = ()

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """All graphs there are."""
        return tuple(g for g in (self.forward, self.again, self.backward) if g is not None)


def count_collectives(program: LocalProgram, *, logical: bool = True) -> Counter[tuple[str, int, str]]:
    """How many collectives run, by (phase, mesh axis, kind).

    Args:
        program: what was lowered.
        logical: count what the plan counts: one per redistributed value, however many share one buffer. Otherwise count
            what goes over the wire.
    """
    counts: Counter[tuple[str, int, str]] = Counter()
    for c in program.collectives:
        counts[c.phase, c.axis, c.kind] += len(c.values) if logical else 1
    return counts


def describe(program: LocalProgram) -> dict[str, Any]:
    """Sizes of a program, for reports and dumps."""
    graphs = [g for g in (program.forward, program.backward) if g is not None]
    return {
        "nodes": [len(g.graph.nodes) for g in graphs],
        "collectives": {" ".join(map(str, k)): n for k, n in count_collectives(program).items()},
        "saved": len(program.saved),
        "sequence_hash": program.sequence_hash,
    }
