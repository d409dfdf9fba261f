"""All ranks of a mesh in one process and one thread: each runs to its next collective, which is then computed for all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from meshwright.planner.ir.errors import VerifyError
from meshwright.planner.ir.mesh import MeshShape

Coordinate = tuple[int, ...]
Asked = tuple[str, tuple[Any, ...]]
Run = Generator[Asked, torch.Tensor, tuple[Any, ...]]

_REDUCE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}


def run_graph(graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> Run:
    """One rank's graph in double precision; hands out each collective as (name, arguments), and goes on with its result."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    last_use = _last_uses(graph)

    def argument(node: fx.Node) -> Any:
        return values[node]

    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        args = _exact(fx.map_arg(node.args, argument))
        if node.op == "output":
            return tuple(args[0])
        kwargs = {k: _exact(fx.map_arg(v, argument)) for k, v in node.kwargs.items()}
        name = str(node.target)
        if name.startswith("_c10d_functional.wait_tensor"):
            values[node] = args[0]
        elif name.startswith("_c10d_functional."):
            values[node] = yield name.split(".")[1], (*args, *kwargs.values())
        else:
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        for done in last_use.get(node, ()):
            del values[done]
    raise VerifyError("the graph has no output")


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found


def _exact(arg: Any) -> Any:
    """Floating element types as double precision."""
    if isinstance(arg, torch.dtype):
        return torch.float64 if arg.is_floating_point else arg
    if isinstance(arg, list | tuple):
        return type(arg)(map(_exact, arg)) if type(arg) in (list, tuple) else [_exact(a) for a in arg]
    return arg


def run_all(runs: Mapping[Coordinate, Run], mesh: MeshShape, groups: Sequence[str]) -> dict[Coordinate, tuple[Any, ...]]:
    """Run every rank to its end.

    Args:
        runs: each rank's run.
        mesh: the mesh.
        groups: name of the process group along each axis.

    Raises:
        VerifyError: the ranks ask for different collectives.
    """
    done: dict[Coordinate, tuple[Any, ...]] = {}
    answers: dict[Coordinate, torch.Tensor | None] = dict.fromkeys(runs)
    while answers:
        asked: dict[Coordinate, Asked] = {}
        for at, answer in answers.items():
            try:
                asked[at] = next(runs[at]) if answer is None else runs[at].send(answer)
            except StopIteration as end:
                done[at] = end.value
        if asked and (done or len({(name, _group(args, groups)) for name, args in asked.values()}) > 1):
            raise VerifyError("the ranks' programs ask for different collectives at one place")
        answers = {at: _answer(at, asked, groups, mesh) for at in asked}
    return done


def _group(args: tuple[Any, ...], groups: Sequence[str]) -> int:
    return next(i for i, name in enumerate(groups) if name in [a for a in args if isinstance(a, str)])


def _answer(at: Coordinate, asked: Mapping[Coordinate, Asked], groups: Sequence[str], mesh: MeshShape) -> torch.Tensor:
    name, args = asked[at]
    axis = _group(args, groups)
    n, mine = mesh.sizes[axis], at[axis]
    inputs = [asked[(*at[:axis], i, *at[axis + 1 :])][1][0] for i in range(n)]
    if name == "all_gather_into_tensor":
        return torch.cat(inputs)
    if name == "all_to_all_single":
        return torch.cat([x.chunk(n)[mine] for x in inputs])
    total = _REDUCE[args[1]](torch.stack(inputs))
    return total if name == "all_reduce" else total.chunk(n)[mine]
