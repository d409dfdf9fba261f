"""First values of a model that no rank ever holds whole: its constructor replayed, or drawn shard by shard.

``replay`` gives the numbers of one process that calls the constructor, bit for bit, and leaves the random generator where it would be;
every rank draws everything, and keeps its pieces. ``sharded`` draws each piece with a seed of its own, made from the parameter's name
and the piece's place: other numbers of the same distribution, no rank draws what it does not keep. What is computed rather than drawn
(buffers, rows of zeros, orthogonal matrices) is replayed then, alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.planner.ir.errors import InputError
from meshwright.runtime.checkpoint.pieces import Piece
from meshwright.runtime.mesh import broadcast_object
from meshwright.runtime.state import copy_into
from meshwright.runtime.tape import Ref, Step, Tape

INITS = ("replay", "sharded", "none")
SHARDED_NOTE = "parameters were drawn shard by shard (init='sharded'): not the numbers that one process draws"

_DRAWN = frozenset({"normal_", "uniform_"})
_SET = frozenset({"zero_", "fill_"})
_CREATED = frozenset({"zeros", "ones", "full"})
_BY_ELEMENT = frozenset({"mul_", "add_", "sub_", "div_", "erfinv_", "clamp_", "neg_", "exp_", "log_", "sqrt_", "abs_", "pow_"})
_SAME = frozenset({"detach", "alias", "lift_fresh", "empty"})


def fill(module: nn.Module, mesh: DeviceMesh, tape: Tape, generator: torch.Tensor, *, sharded: bool) -> None:
    """Give parameters and buffers of a parallel module their first values. Collective over ``mesh``.

    Args:
        module: its parameters are DTensors; those of other stages are not there.
        mesh: all ranks of the module.
        tape: what the constructor does.
        generator: the state of torch's generator to begin with; the first rank's counts.
        sharded: whether each piece is drawn by itself.

    Raises:
        InputError: the constructor makes other parameters than the module has.
    """
    state, seed = broadcast_object((generator, torch.initial_seed()), mesh)
    targets: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    targets.update(module.named_buffers(remove_duplicate=False))
    for name, t in targets.items():
        if name not in tape.finals or tape.finals[name].shape != tuple(t.shape):
            raise InputError(
                f"the model's constructor makes {name} otherwise when it is called again: it must always make the same"
            )

    def keep(name: str, whole: torch.Tensor) -> None:
        if name in targets:
            copy_into(targets[name], whole)

    with torch.no_grad():
        if not sharded:
            torch.set_rng_state(state)
            tape.replay(keep)
            return
        recipes = {name: recipe for name, t in targets.items() if isinstance(t, DTensor) and (recipe := recipe_of(tape, name))}
        for name, recipe in recipes.items():
            _draw(targets[name], f"{seed}/{_first_name(tape, name)}", recipe)
        rest = targets.keys() - recipes.keys()
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        tape.replay(lambda name, whole: keep(name, whole) if name in rest else None, tape.needed(set(rest)))
        torch.set_rng_state(before)


def _first_name(tape: Tape, name: str) -> str:
    """Tied parameters draw alike, under whichever name."""
    return next(n for n, ref in tape.finals.items() if ref.storage == tape.finals[name].storage)


def recipe_of(tape: Tape, name: str) -> list[Step] | None:
    """The ops that make a parameter element by element out of nothing: draws, constants, arithmetic; None where there are others."""
    steps = [s for s in tape.own_steps(name) if s.name not in _SAME]
    if not steps or not tape.finals[name].is_all:
        return None
    first, storage = steps[0], tape.finals[name].storage
    begins = first.name in _DRAWN | _SET or (first.name in _CREATED and not first.refs)
    plain = all(s.name in _BY_ELEMENT and len(s.refs) == 1 and s.refs[0].is_all for s in steps[1:])
    return steps if begins and plain and all(r.storage == storage for s in steps for r in s.refs) else None


def _draw(target: torch.Tensor, seed: str, recipe: list[Step]) -> None:
    piece = Piece.of(target)
    place = ",".join(str(box.offsets) for box in piece.boxes)
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    generator = torch.Generator(piece.local.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    for step in recipe:
        if step.name in _CREATED:
            value = {"zeros": 0.0, "ones": 1.0}.get(step.name, step.args[-1] if step.name == "full" else 0.0)
            piece.local.fill_(value)
            continue
        args = [piece.local if isinstance(a, Ref) else a for a in step.args]
        kwargs: Mapping[str, Any] = {**step.kwargs, "generator": generator} if step.name in _DRAWN else step.kwargs
        step.op(*args, **kwargs)
