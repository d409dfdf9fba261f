"""Logical meshes: the ways to arrange devices in up to three axes, and what each axis may be used for.

Devices keep their order (row-major), so an arrangement is an ordered factorisation of their number: 8x8 devices as ``(64,)``,
``(2, 32)``, ``(4, 16)``, ... Which axis does what is the plan's choice; *degrees* fix it: ``{"tp": 8}`` is one axis of 8 for tensor
parallelism, inner or outer, and the other devices do anything else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.planner.cost import Topology
from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.hardware import Hardware
from meshwright.planner.ir.mesh import MeshShape
from meshwright.planner.solve.strategies import AXIS_NAMES, DEGREES, ROLES, AxisRule, axis_name_rules

# Axes of the meshes that are searched, and of those that the best of them are split into.
AXES = 2
MOST_AXES = 3

_ALIASES = {"data": "dp", "fsdp": "dp", "model": "tp"}
_NOT_YET = ("pp", "ep")
# Outer to inner, as most people do: looked at first. What is left for anything comes second.
_USUAL = ("dp", "", "cp", "tp")
_ROLES = ("dp", "cp", "tp")


@dataclass(frozen=True)
class LogicalMesh:
    """Devices arranged in axes, and what is under and allowed on each.

    Attributes:
        mesh: sizes and names.
        hardware: device, and the link of each axis.
        rules: what may happen on each axis; empty: anything.
        demand: what asks for the rules, for messages.
        is_inner: whether every group of the last axis lies within a node.
    """

    mesh: MeshShape
    hardware: Hardware
    rules: tuple[AxisRule, ...] = ()
    demand: str = ""
    is_inner: bool = True

    def __post_init__(self) -> None:
        if len(self.hardware.links) != self.mesh.num_axes:
            raise InputError(
                f"hardware has {len(self.hardware.links)} links, but mesh {self.mesh} has {self.mesh.num_axes} axes: "
                "give one link per axis"
            )


@dataclass(frozen=True)
class MeshRequest:
    """What a user says about the logical mesh.

    Attributes:
        logical_mesh: ``"search"``, ``"given"`` (the axes of the mesh as they are), sizes of exactly one mesh, sizes by the names of
            its axes, or None: what suits the kind of mesh that was given.
        degrees: size of the axis for each of ``dp``, ``cp``, ``tp``; those left out are searched.
        respect_axis_names: keep the given axes (or the named ones of ``logical_mesh``) and use them as their names say.
        pinned_axes: number of axes that pins speak of; None without pins.
    """

    logical_mesh: str | tuple[int, ...] | Mapping[str, int] | None = None
    degrees: Mapping[str, int] | None = None
    respect_axis_names: bool = False
    pinned_axes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.logical_mesh, str) and self.logical_mesh not in ("search", "given"):
            raise InputError(
                f"logical_mesh={self.logical_mesh!r} is not known: use 'search', 'given' (the mesh as it is), sizes as (8, 8), or "
                "named sizes as {'dp': 8, 'tp': 8}"
            )
        said = {
            "degrees": bool(self.degrees),
            "logical_mesh": self.logical_mesh not in (None, "search"),
            "respect_axis_names": self.respect_axis_names,
        }
        both = [name for name, is_said in said.items() if is_said]
        has_names = self.logical_mesh == "given" or isinstance(self.logical_mesh, Mapping)
        if len(both) > 1 and not (has_names and not self.degrees):
            raise InputError(f"{' and '.join(both)} each say which logical mesh to use: give one of them")

    def searches(self, by_default: bool) -> bool:
        """Whether to search, ``by_default`` where nothing is said."""
        if self.respect_axis_names or self.degrees:
            return bool(self.degrees)
        if self.logical_mesh is not None:
            return self.logical_mesh == "search"
        return by_default and self.pinned_axes is None


def logical_meshes(topology: Topology, request: MeshRequest, *, search: bool) -> tuple[LogicalMesh, ...]:
    """The meshes to look at, at least one: the given arrangement first, if it is among them.

    Args:
        topology: the devices.
        request: what the user says.
        search: whether to search where the user says nothing.

    Raises:
        InputError: degrees or sizes that do not suit the number of devices, or unknown names.
    """
    if request.degrees:
        return _by_degrees(topology, request)
    if isinstance(request.logical_mesh, Mapping):
        return (_called(topology, request.logical_mesh, request.respect_axis_names),)
    if isinstance(request.logical_mesh, tuple):
        return (_arranged(topology, _exactly(topology, request.logical_mesh)),)
    given = _as_named(topology, topology.shape, request.respect_axis_names)
    if not request.searches(search):
        return (given,)
    shapes = [s for s in factorisations(topology.shape.num_devices, AXES) if request.pinned_axes in (None, len(s))]
    plain = _plain(topology.shape)
    found = [_arranged(topology, MeshShape.of(*sizes)) for sizes in shapes if sizes != plain.sizes and topology.ascending(sizes)]
    if request.pinned_axes in (None, plain.num_axes) and plain.num_axes <= AXES:
        found.insert(0, _arranged(topology, plain))
    return tuple(found) or (given,)


def meshes_in_roles(topology: Topology, request: MeshRequest) -> tuple[LogicalMesh, ...]:
    """The devices as ``dp`` x ``cp`` x ``tp`` in all sizes (those asked for), what computes follows batch and sequence over the first two.

    Raises:
        InputError: degrees that do not suit the number of devices, or unknown names.
    """
    asked = _checked_degrees(request.degrees or {}, topology.shape)
    found: dict[tuple, LogicalMesh] = {}
    for sizes in _three_factors(topology.shape.num_devices):
        axes = dict(zip(_ROLES, sizes, strict=True))
        if any(axes[name] != n for name, n in asked.items()):
            continue
        kept = [(name, n) for name, n in axes.items() if n > 1] or [(_ROLES[0], 1)]
        mesh = MeshShape(tuple(n for _, n in kept), tuple(name for name, _ in kept))
        if topology.ascending(mesh.sizes):
            found[mesh.sizes, mesh.names] = _arranged(
                topology, mesh, tuple(ROLES[name] for name in mesh.names), "the axes' roles"
            )
    return tuple(found.values())


def _three_factors(devices: int) -> Iterator[tuple[int, int, int]]:
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tp, cp in itertools.product(divisors, divisors):
        if devices % (tp * cp) == 0:
            yield devices // (tp * cp), cp, tp


def finer(topology: Topology, where: LogicalMesh) -> tuple[LogicalMesh, ...]:
    """The meshes of three axes that split one axis of ``where`` in two, and the given one if it has three."""
    sizes = where.mesh.sizes
    if len(sizes) != MOST_AXES - 1 or where.rules:
        return ()
    splits = [
        (*sizes[:axis], a, size // a, *sizes[axis + 1 :])
        for axis, size in enumerate(sizes)
        for a in range(2, size)
        if size % a == 0
    ]
    plain = _plain(topology.shape)
    given = [plain] if plain.num_axes == MOST_AXES else []
    shapes = [MeshShape.of(*split) for split in dict.fromkeys(splits) if split not in [p.sizes for p in given]]
    return tuple(_arranged(topology, shape) for shape in (*given, *shapes) if topology.ascending(shape.sizes))


def factorisations(devices: int, axes: int) -> tuple[tuple[int, ...], ...]:
    """Ordered factorisations of ``devices`` into up to ``axes`` factors above 1, fewest factors first.

    >>> factorisations(8, 2), factorisations(7, 3), factorisations(1, 2)
    (((8,), (2, 4), (4, 2)), ((7,),), ((1,),))
    """
    found = {n: list(_ordered(devices, n)) for n in range(1, axes + 1)}
    return tuple(itertools.chain.from_iterable(found.values())) or ((1,),)


def _ordered(devices: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        if devices > 1:
            yield (devices,)
        return
    for first in range(2, devices // 2 + 1):
        if devices % first == 0:
            for rest in _ordered(devices // first, factors - 1):
                yield (first, *rest)


# --- from a request -----------------------------------------------------------------------------------------------


def _arranged(topology: Topology, mesh: MeshShape, rules: tuple[AxisRule, ...] = (), demand: str = "") -> LogicalMesh:
    inner = topology.inside(mesh.sizes, mesh.num_axes - 1)
    return LogicalMesh(mesh, topology.hardware(mesh), rules, demand, inner)


def _as_named(topology: Topology, mesh: MeshShape, respect_axis_names: bool) -> LogicalMesh:
    """Exactly ``mesh``; with ``respect_axis_names`` its axes are for what they are called.

    Raises:
        InputError: no name says anything.
    """
    if not respect_axis_names:
        return _arranged(topology, mesh)
    if mesh.num_devices > 1 and not set(mesh.names) & set(AXIS_NAMES):
        raise InputError(
            f"respect_axis_names, but no axis of mesh {mesh} ({', '.join(mesh.names)}) is called {', '.join(AXIS_NAMES)}: name the axes, "
            "as logical_mesh={'dp': 8, 'tp': 8} on a cluster of 64, or say degrees"
        )
    return _arranged(topology, mesh, axis_name_rules(mesh), "the axis names")


def _called(topology: Topology, axes: Mapping[str, int], respect_axis_names: bool) -> LogicalMesh:
    """The mesh of these sizes and names."""
    if unknown := [name for name in axes if not isinstance(name, str) or not name]:
        raise InputError(f"logical_mesh {dict(axes)} names an axis {unknown[0]!r}: names are words")
    if "pp" in axes:
        raise InputError(f"logical_mesh {dict(axes)} is the mesh inside a stage: say how many stages with degrees={{'pp': ...}}")
    sizes = _exactly(topology, tuple(axes.values())).sizes
    return _as_named(topology, MeshShape(sizes, tuple(axes)), respect_axis_names)


def _plain(shape: MeshShape) -> MeshShape:
    """A shape without its axes of size 1."""
    kept = [(n, name) for n, name in zip(shape.sizes, shape.names, strict=True) if n > 1]
    return MeshShape(tuple(n for n, _ in kept), tuple(name for _, name in kept)) if kept else MeshShape.of(1)


def _exactly(topology: Topology, sizes: tuple[int, ...]) -> MeshShape:
    devices = topology.shape.num_devices
    if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes) or math.prod(sizes) != devices:
        text = "x".join(map(str, sizes))
        raise InputError(
            f"logical_mesh {text} has {_product(sizes)} devices, but there are {devices} ({topology.shape}): give sizes whose "
            f"product is {devices}"
        )
    names = topology.shape.names if sizes == topology.shape.sizes else None
    return MeshShape.of(*sizes, names=names)


def _product(sizes: tuple[int, ...]) -> str:
    return str(math.prod(sizes)) if sizes and all(isinstance(n, int) for n in sizes) else "no number of"


def _by_degrees(topology: Topology, request: MeshRequest) -> tuple[LogicalMesh, ...]:
    """One mesh per order of the axes (with pins: the order in which they were named); what the named axes leave is a further one."""
    degrees = _checked_degrees(request.degrees or {}, topology.shape)
    named = [(name, n) for name, n in degrees.items() if n > 1]
    left = topology.shape.num_devices // math.prod(degrees.values())
    free = [name for name in DEGREES if name not in degrees]
    splits = factorisations(left, max(1, AXES - len(named))) if left > 1 else ((),)
    demand = "degrees " + ", ".join(f"{name}={n}" for name, n in degrees.items())
    found: dict[tuple, LogicalMesh] = {}
    for split in splits:
        names = [free[0]] if len(free) == 1 and len(split) == 1 else [f"axis{i}" for i in range(len(split))]
        rest = [(name, n, _rest_rule(free)) for name, n in zip(names, split, strict=True)]
        axes = [*((name, n, DEGREES[name]) for name, n in named), *rest]
        usual = sorted(axes, key=lambda axis: _USUAL.index(axis[0]) if axis[0] in _USUAL else 1)
        orders = itertools.permutations(usual) if request.pinned_axes is None else iter([tuple(axes)])
        for order in orders:
            sizes = tuple(n for _, n, _ in order) or (1,)
            mesh = MeshShape(sizes, tuple(name for name, _, _ in order) or ("axis0",))
            if topology.ascending(sizes) and request.pinned_axes in (None, len(sizes)):
                allowed = tuple(rule for _, _, rule in order) or (AxisRule(),)
                found.setdefault((sizes, allowed), _arranged(topology, mesh, allowed, demand))
    if not found:
        raise InputError(
            f"{demand} gives no mesh of {topology.shape} whose ranks ascend along every axis"
            + (f" and that has {request.pinned_axes} axes, as the pins say" if request.pinned_axes else "")
        )
    return tuple(found.values())


def _checked_degrees(degrees: Mapping[str, int], shape: MeshShape) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, n in degrees.items():
        axis = _ALIASES.get(name, name)
        if axis in _NOT_YET and n == 1:
            continue
        if axis not in DEGREES:
            why = "is not planned yet" if axis in _NOT_YET else "is not known"
            raise InputError(f"degree {name!r} {why}: use {', '.join(DEGREES)}")
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InputError(f"degree {name}={n!r} must be a whole number of devices, at least 1")
        if axis in found:
            raise InputError(f"degrees {dict(degrees)} name {axis!r} twice")
        found[axis] = n
    devices, product = shape.num_devices, math.prod(found.values())
    text = " x ".join(f"{name}={n}" for name, n in found.items())
    if devices % product:
        raise InputError(
            f"degrees {text} = {product} do not divide the {devices} devices of {shape}: choose divisors of {devices}"
        )
    if len(found) == len(DEGREES) and product != devices:
        raise InputError(
            f"degrees {text} = {product}, but {shape} has {devices} devices: the product must be {devices}, or leave one out to be searched"
        )
    return found


def _rest_rule(free: list[str]) -> AxisRule:
    """What an axis may do that is for any of the degrees left out."""
    batch = {("dp", "cp"): "free", ("dp",): "batch only", ("cp",): "sequence only"}.get(
        tuple(name for name in free if name != "tp"), "whole"
    )
    return AxisRule(batch=batch, use="free" if "tp" in free else "whole")
