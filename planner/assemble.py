"""From AOTAutograd's joint graph to a :class:`Capture`'s graph and view: who is who among inputs and outputs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from meshwright.planner.builder import Builder
from meshwright.planner.faking import StateNames, fake_like
from meshwright.planner.ir.errors import TraceError
from meshwright.planner.ir.graph import GraphInput, GraphOutput, OpGraph, fx_value, ops_of
from meshwright.planner.normalise import arranged, rewrite_ops
from meshwright.planner.provenance import annotate, source_of
from meshwright.planner.structure import Call, leaf_names

PREFIX = "model"
"""Attribute of the traced program that holds the user's model."""

Result = tuple[fx.Node | None, GraphOutput]


def _fqn(target: str) -> str:
    return target.removeprefix(PREFIX + ".")


def _identifier(role: str, name: str) -> str:
    return role + "_" + re.sub(r"\W+", "_", name).strip("_")


def _attribute(module: torch.nn.Module, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


@dataclasses.dataclass(frozen=True)
class Traced:
    """A joint graph as traced.

    Attributes:
        graph: its placeholders and output have torch's descriptors in ``meta["desc"]``.
        constants: holds, as attributes, what its ``get_attr`` nodes name.
        program: holds parameters and buffers by the names in the descriptors.
        mode: of the fake tensors.
    """

    graph: fx.Graph
    constants: torch.nn.Module
    program: torch.nn.Module
    mode: Any


class Assembly:
    """Copies one traced joint graph into normal form: inputs, ops, outputs.

    Attributes:
        constants: values of the ``"constant"`` placeholders by name, filled by :meth:`run`.
    """

    def __init__(self, traced: Traced, parameters: StateNames, buffers: StateNames, call: Call):
        self.constants: dict[str, torch.Tensor] = {}
        self._traced = traced
        self._state = {"parameter": parameters, "buffer": buffers}
        self._call = call
        self._mode = traced.mode
        self._builder = Builder(traced.mode)
        self._inputs: list[tuple[fx.Node, GraphInput]] = []
        self._holders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        self._first = {**parameters.first_of(), **buffers.first_of()}
        self._out_names = leaf_names(call.out_spec, "output")
        (self._returned,) = (n for n in traced.graph.nodes if n.op == "output")

    def run(self) -> tuple[fx.Graph, OpGraph]:
        """The graph in normal form and its view.

        Raises:
            TraceError: an input or parameter that is changed in place, or an op that cannot be planned.
        """
        self._check_mutations()
        self._place_state()
        self._place_batch()
        self._place_constants()
        tangents = self._place_tangents()
        rewrite_ops(self._builder, self._traced.graph.nodes, source_of)
        self._place_seed()
        self._inputs += tangents
        forward = [*self._mutations(), *self._outputs()]
        backward = self._gradients()
        graph = arranged(self._builder.graph, [n for n, _ in self._inputs], [n for n, _ in forward], [n for n, _ in backward])
        annotate(graph, PREFIX)
        return graph, self._view(graph, [o for _, o in (*forward, *backward)])

    # --- inputs -----------------------------------------------------------------------------------------------

    def _place(self, role: str, name: str, val: torch.Tensor, **more: Any) -> tuple[fx.Node, GraphInput]:
        node = self._builder.placeholder(_identifier(role, name), val)
        return node, GraphInput(fx_value(node), role, name, **more)

    def _place_state(self) -> None:
        """One placeholder for every parameter and buffer, used or not; tied ones share it."""
        placed: dict[str, fx.Node] = {}
        for role, state in self._state.items():
            for first, names in state.groups.items():
                tensor = state.tensors[first]
                trainable = role == "parameter" and tensor.requires_grad
                entry = self._place(role, first, fake_like(tensor, self._mode), aliases=names[1:], trainable=trainable)
                placed[first] = entry[0]
                self._inputs.append(entry)
        for old in self._holders:
            desc = old.meta["desc"]
            if isinstance(desc, ParamAOTInput | BufferAOTInput) and _fqn(desc.target) in self._first:
                self._builder.made[old] = placed[self._first[_fqn(desc.target)]]

    def _place_batch(self) -> None:
        by_index = {n.meta["desc"].idx: n for n in self._holders if isinstance(n.meta["desc"], PlainAOTInput)}
        for index, leaf in enumerate(self._call.tensor_at):
            entry = self._place("input", self._call.names[leaf], by_index[index].meta["val"])
            self._builder.made[by_index[index]] = entry[0]
            self._inputs.append(entry)

    def _place_constants(self) -> None:
        """Tensors that capture baked in: attributes of the traced graph, and buffers that the model does not have."""
        found: list[tuple[fx.Node, Any]] = [
            (n, _attribute(self._traced.constants, n.target)) for n in self._traced.graph.nodes if n.op == "get_attr"
        ]
        for old in self._holders:
            desc = old.meta["desc"]
            if isinstance(desc, ParamAOTInput | BufferAOTInput) and old not in self._builder.made:
                found.append((old, _attribute(self._traced.program, desc.target)))
        placed: dict[int, fx.Node] = {}
        for old, value in found:
            if id(value) not in placed and old.users:
                name = f"constant_{len(placed)}"
                self.constants[name] = value.detach()
                node, entry = self._place("constant", name, fake_like(value, self._mode))
                placed[id(value)] = node
                self._inputs.append((node, entry))
            if old.users:
                self._builder.made[old] = placed[id(value)]

    def _place_tangents(self) -> list[tuple[fx.Node, GraphInput]]:
        entries = []
        for old in self._holders:
            desc = old.meta["desc"]
            if isinstance(desc, TangentAOTInput):
                leaf = self._call.out_tensor_at[desc.output.idx]  # type: ignore[attr-defined]
                entries.append(self._place("tangent", self._out_names[leaf], old.meta["val"]))
                self._builder.made[old] = entries[-1][0]
        return entries

    def _place_seed(self) -> None:
        if (seed := self._builder.seed) is not None:
            self._inputs.append((seed, GraphInput(fx_value(seed), "seed", "seed")))

    # --- outputs ----------------------------------------------------------------------------------------------

    def _results(self, kind: type) -> list[tuple[Any, fx.Node | None]]:
        """Descriptor and new node of every result of one kind, in order."""
        pairs = zip(self._returned.meta["desc"], self._returned.args[0], strict=True)
        made = self._builder.made
        return [(desc, made[n] if isinstance(n, fx.Node) else None) for desc, n in pairs if isinstance(desc, kind)]

    def _check_mutations(self) -> None:
        for desc in self._returned.meta["desc"]:
            if not isinstance(desc, InputMutationAOTOutput):
                continue
            changed = desc.mutated_input
            if isinstance(changed, PlainAOTInput):
                name = self._call.names[self._call.tensor_at[changed.idx]]
                raise TraceError(f"forward changes its input {name!r} in place: work on a copy ({name}.clone()) instead")
            if not isinstance(changed, BufferAOTInput) or _fqn(changed.target) not in self._first:
                name = _fqn(getattr(changed, "target", str(changed)))
                raise TraceError(
                    f"forward changes {name!r} in place: only buffers may change in forward (register_buffer); parameters change "
                    "in the optimizer's step"
                )

    def _mutations(self) -> list[Result]:
        found: list[Result] = []
        for desc, node in self._results(InputMutationAOTOutput):
            assert node is not None
            found.append((node, GraphOutput(fx_value(node), "mutation", self._first[_fqn(desc.mutated_input.target)])))
        return found

    def _outputs(self) -> list[Result]:
        nodes = {desc.idx: node for desc, node in self._results(PlainAOTOutput)}
        tensor_at = self._call.out_tensor_at
        found: list[Result] = []
        for i, (name, leaf) in enumerate(zip(self._out_names, self._call.out_leaves, strict=True)):
            if i not in tensor_at:
                found.append((None, GraphOutput(None, "output", name, constant=leaf)))
                continue
            node = nodes[tensor_at.index(i)]
            assert node is not None
            differentiable = self._call.differentiable[i]
            found.append((node, GraphOutput(fx_value(node), "output", name, differentiable=differentiable)))
        return found

    def _gradients(self) -> list[Result]:
        """One result per trainable parameter (summed over its names) and per input that requires a gradient."""
        terms: dict[tuple[str, str], list[fx.Node]] = {}
        for first, tensor in self._state["parameter"].tensors.items():
            if tensor.requires_grad and self._call.differentiable.count(True):
                terms["parameter", first] = []
        for desc, node in self._results(GradAOTOutput):
            of = desc.grad_of
            if isinstance(of, PlainAOTInput):
                leaf = self._call.tensor_at[of.idx]
                if self._call.leaves[leaf].requires_grad:
                    terms.setdefault(("input", self._call.names[leaf]), []).extend([node] if node is not None else [])
            elif node is not None:
                terms["parameter", self._first[_fqn(of.target)]].append(node)
        return [self._gradient(name, nodes) for (_, name), nodes in terms.items()]

    def _gradient(self, name: str, nodes: list[fx.Node]) -> Result:
        self._builder.like = None
        total = nodes[0] if nodes else None
        for node in nodes[1:]:
            total = self._builder.emit(torch.ops.aten.add.Tensor, total, node, val=node.meta["val"])
        return total, GraphOutput(None if total is None else fx_value(total), "gradient", name)

    # --- the view ---------------------------------------------------------------------------------------------

    def _view(self, graph: fx.Graph, outputs: list[GraphOutput]) -> OpGraph:
        """The typed view, with the names of the arranged graph."""
        holders = [n for n in graph.nodes if n.op == "placeholder"]
        inputs = tuple(dataclasses.replace(i, value=fx_value(n)) for n, (_, i) in zip(holders, self._inputs, strict=True))
        (returned,) = (n for n in graph.nodes if n.op == "output")
        results = tuple(
            dataclasses.replace(o, value=None if n is None else fx_value(n))
            for n, o in zip(returned.args[0], outputs, strict=True)
        )
        return OpGraph(inputs, ops_of(graph), results)
