"""Capture in one pass: what runs below autograd is written down as it runs, first the forward, then the backward.

    y = torch.relu(x @ w)                ->   mm = aten.mm(x, w);  relu = aten.relu(mm)
    y.backward(g)                        ->   tb = aten.threshold_backward(g, relu, 0);  ...

Export and AOTAutograd run a model three times, each time through several layers of interpretation, so that they can follow
whatever it does to memory. A model that writes in place only to tensors that nobody reads by another name needs none of that:
``x.add_(y)`` is ``add(x, y)``, read from then on in the place of ``x``. Everything else is :class:`Unusual`, and is captured their
way.
"""

from __future__ import annotations

import contextlib
import linecache
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed

from meshwright.planner.faking import fake_as
from meshwright.planner.provenance import is_users
from meshwright.planner.remember import Remembering

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default


class Unusual(Exception):
    """The model does something that one pass does not follow."""


# --- what writes in place -----------------------------------------------------------------------------------------

_FUNCTIONAL = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.normal_.default: aten.normal_functional.default,
}
"""Ops whose form that returns its result has another name than theirs without the underscore."""

_SCATTER = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""A part of a tensor to the op that gives the tensor with another part in its place."""


def _written(target: torch._ops.OpOverload) -> list[int]:
    """Positions of the arguments that an op writes to."""
    return [i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def _functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The op that returns what ``target`` writes to its first argument.

    Raises:
        Unusual: there is none.
    """
    if target in _FUNCTIONAL:
        return _FUNCTIONAL[target]
    if torch.Tag.inplace_view in target.tags:
        raise Unusual(f"{target} changes a tensor's shape in place")
    packet = target.overloadpacket
    name = packet._qualified_op_name.split("::")[-1]
    form = getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None)
    found = getattr(form, target._overloadname, None)
    if not name.endswith("_") or found is None or found._schema.is_mutable or _written(target) != [0]:
        raise Unusual(f"{target} writes to memory")
    return found


@cache
def _gives_view(target: torch._ops.OpOverload) -> bool:
    """Whether an op's one result is a view of its first argument."""
    returns, arguments = target._schema.returns, target._schema.arguments
    of = arguments[0].alias_info if arguments else None
    return len(returns) == 1 and returns[0].alias_info is not None and of is not None and not target._schema.is_mutable


# --- arguments ----------------------------------------------------------------------------------------------------


@cache
def _defaults(target: torch._ops.OpOverload) -> tuple[list[Any], dict[str, Any]]:
    """Defaults of positional arguments (``_NONE`` without), and of keyword arguments."""
    arguments = target._schema.arguments
    given = [(a, a.default_value if a.has_default_value() else _NONE) for a in arguments]
    return [d for a, d in given if not a.kwarg_only], {a.name: d for a, d in given if a.kwarg_only}


_NONE = object()


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, torch.Tensor) and bool(value == default)


def _without_defaults(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """A call's arguments without those at the end, and the keywords, that say what the default says."""
    positional, keyword = _defaults(target)
    count = len(args)
    while count and _is_default(args[count - 1], positional[count - 1]):
        count -= 1
    return args[:count], {k: v for k, v in kwargs.items() if not _is_default(v, keyword.get(k, _NONE))}


# --- the recorder -------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Writes every op into a graph.

    Args:
        mode: of the fake tensors.
        decompositions: overload to what is done in its place.
        root: code of the function whose frame is the outermost of the model's.

    Attributes:
        graph: what was recorded.
        holder: holds the constants, as attributes named by ``get_attr`` nodes.
        in_backward: whether the backward runs.
        modules: dotted paths of the modules that run, innermost last.
        differentiates: in the backward, the number of the autograd node that runs; None between two of them.
        unusual: why the recording is of no use, or ``""``.
    """

    def __init__(self, mode: FakeTensorMode, decompositions: Mapping[Any, Callable[..., Any]], root: CodeType):
        super().__init__()
        self.graph = fx.Graph()
        self.holder = nn.Module()
        self.in_backward = False
        self.modules: list[str] = []
        self.differentiates: int | None = None
        self.unusual = ""
        self._mode, self._decompositions, self._root = mode, decompositions, root
        self._run = Remembering(mode, views=False)
        self._nodes: dict[int, fx.Node] = {}
        self._memory: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []  # so that no other tensor gets the id of one that is known
        self._sharing: dict[int, list[int]] = {}
        self._stale: set[int] = set()
        self._written: set[int] = set()
        self._late: dict[int, tuple[Any, Any, Any, dict[str, Any]]] = {}
        self._inputs: set[int] = set()
        self._fixed: set[int] = set()
        self._part_of: dict[int, tuple[Any, torch.Tensor, Any]] = {}
        self._results: list[tuple[fx.Node, Any]] = []
        self._composites: dict[Any, tuple[bool, bool]] = {}
        self._first: dict[int, dict[str, Any]] = {}
        self._stacks: dict[str, dict[str, tuple[str, None]]] = {}
        self._last_source = ""

    # --- values ---

    def placeholder(self, tensor: torch.Tensor, desc: Any, fixed: bool) -> fx.Node:
        """An input; one that is ``fixed`` must not be written to."""
        node = self.graph.placeholder(f"in_{len(self._tensors)}")
        node.meta.update(val=fake_as(tensor, self._mode), desc=desc)
        self._know(tensor, node)
        self._inputs.add(id(tensor))
        if fixed:
            self._fixed.add(id(tensor))
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node that makes a tensor as it is now.

        Raises:
            Unusual: it was made elsewhere, or changed by another name.
        """
        node = self._nodes.get(id(tensor))
        if id(tensor) in self._late:
            node = self._taken_late(tensor)
        elif node is None:
            node = self._constant(tensor)
        elif id(tensor) in self._stale:
            node = self._taken_again(tensor)
        elif self._memory[id(tensor)] != tensor.untyped_storage()._cdata:
            raise Unusual("a tensor is given other memory")
        return node

    def _taken_late(self, tensor: torch.Tensor) -> fx.Node:
        """A view of what had been written to is taken when it is first read, and sees what was written since."""
        func, args, kwargs, meta = self._late.pop(id(tensor))
        node = self._node(func, tuple(map(self._argument, args)), kwargs, tensor, meta)
        self._nodes[id(tensor)] = node
        self._stale.discard(id(tensor))
        return node

    def _taken_again(self, tensor: torch.Tensor) -> fx.Node:
        """A part of a tensor that was written to since it was taken."""
        if id(tensor) not in self._part_of or tensor.requires_grad:
            raise Unusual("a tensor is written to in place and read by another name")
        target, whole, args = self._part_of[id(tensor)]
        node = self._node(target, (self.node_of(whole), *args), {}, tensor)
        self._nodes[id(tensor)] = node
        self._stale.discard(id(tensor))
        return node

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.requires_grad:
            raise Unusual(f"a {type(tensor).__name__} comes from outside")
        name = f"constant_{len(self._tensors)}"
        object.__setattr__(self.holder, name, tensor)
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = fake_as(tensor, self._mode)
        self._know(tensor, node)
        self._inputs.add(id(tensor))
        self._fixed.add(id(tensor))
        return node

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        memory = self._memory[id(tensor)] = tensor.untyped_storage()._cdata
        self._tensors.append(tensor)
        self._sharing.setdefault(memory, []).append(id(tensor))

    # --- ops ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if self.unusual or func.namespace == "prim":  # prim: questions about a tensor
            return func(*args, **kwargs)
        try:
            return self._done(func, args, kwargs)
        except Exception as e:  # not from here: autograd calls some ops where an exception ends the process
            self.unusual = str(e) or type(e).__name__
            return func(*args, **kwargs)

    def _done(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        for apart in (self._composite(func, args, kwargs), self._decompositions.get(func)):
            if apart is not None:
                with self:
                    done = apart(*args, **kwargs)
                if done is not NotImplemented:
                    return done
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        return self._record(func, args, kwargs)

    def _composite(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """How an op that is made of others is taken apart where autograd did not run and do it."""
        if func not in self._composites:
            aliases = any(a.alias_info is not None for a in func._schema.arguments)
            self._composites[func] = (func._can_decompose(), aliases)
        can, always = self._composites[func]
        if not can or not (always or autograd_would_have_decomposed(func, [*args, *kwargs.values()])):
            return None
        return func.decompose

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        said_args, said_kwargs = _without_defaults(func, args, kwargs)
        if _gives_view(func) and self._memory.get(id(args[0])) in self._written:
            return self._view_of_written(func, args, kwargs, said_args, said_kwargs)
        new_args = tuple(map(self._argument, said_args))
        new_kwargs = {k: self._argument(v) for k, v in said_kwargs.items()}
        out = self._run(func, args, kwargs)
        several = isinstance(out, list | tuple)
        if not isinstance(out, torch.Tensor) and not (several and any(isinstance(x, torch.Tensor) for x in out)):
            return out
        node = self._node(func, new_args, new_kwargs, out)
        if not several:
            self._know(out, node)
            if func in _SCATTER:
                self._part_of[id(out)] = (func, args[0], said_args[1:])
            return out
        for i, made in enumerate(out):
            if isinstance(made, torch.Tensor):
                item = self.graph.create_node("call_function", operator.getitem, (node, i), name="getitem")
                item.meta.update(node.meta)
                self._results.append((item, made))
                self._know(made, item)
        return out

    def _view_of_written(self, func: Any, args: Any, kwargs: Any, said_args: Any, said_kwargs: Any) -> torch.Tensor:
        out = func(*args, **kwargs)
        self._late[id(out)] = (func, said_args, said_kwargs, self._provenance())
        self._hold(out)
        if func in _SCATTER:
            self._part_of[id(out)] = (func, args[0], said_args[1:])
        return out

    def _node(self, func: Any, args: Any, kwargs: Any, out: Any, meta: dict[str, Any] | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", func, args, kwargs, name=func._opname)
        node.meta.update(self._provenance() if meta is None else meta)
        self._results.append((node, out))
        return node

    def _argument(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.node_of(x)
        if isinstance(x, list | tuple):
            return [self._argument(y) for y in x]
        return x

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._native_batch_norm_legit.default:
            with self:
                *outs, mean, var = aten._native_batch_norm_legit_functional.default(*args, **kwargs)
            self._write(args[3], mean)
            self._write(args[4], var)
            return tuple(outs)
        functional, tensors = _functional(func), [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if args[0]._is_view() and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise Unusual("forward writes to a part of a tensor with a gradient")
        with self:
            new = functional(*args, **kwargs)
            if new.dtype != args[0].dtype:
                new = aten._to_copy.default(new, dtype=args[0].dtype)
        self._write(args[0], new)
        return args[0]

    def _write(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """From now on ``tensor`` reads as ``new``, and what it is a part of has it; by other names its memory is not read."""
        if new.shape != tensor.shape:
            raise Unusual("forward writes what has another shape")
        while id(tensor) in self._part_of:
            target, tensor, args = self._part_of[id(tensor)]
            with self:
                new = _SCATTER[target](tensor, new, *args)
        if id(tensor) not in self._nodes or id(tensor) in self._fixed or id(tensor) in self._stale:
            raise Unusual("forward writes to what is not its own")
        sharing = self._sharing[self._memory[id(tensor)]]
        if any(i in self._inputs for i in sharing if i != id(tensor)):
            raise Unusual("forward writes to an input by another name")
        self._stale.update(sharing)
        self._written.add(self._memory[id(tensor)])
        self._stale.discard(id(tensor))
        self._nodes[id(tensor)] = self._nodes[id(new)]

    # --- where ops come from ---

    def _provenance(self) -> dict[str, Any]:
        if not self.in_backward:
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                raise Unusual("saved tensors are hooked")
            number = torch.autograd._get_sequence_nr() - 1
            found = {"seq_nr": number, "nn_module_stack": self._stack(), "stack_trace": self._source()}
            self._first.setdefault(number, found)
            return found
        if self.differentiates is None:  # a sum of gradients, by the source of the op before it
            return {"stack_trace": self._last_source}
        first = self._first.get(self.differentiates)
        self._last_source = "" if first is None else first["stack_trace"]
        stack = None if first is None else first["nn_module_stack"]
        return {"seq_nr": self.differentiates, "fwd_nn_module_stack": stack, "stack_trace": self._last_source}

    def _stack(self) -> dict[str, tuple[str, None]]:
        path = self.modules[-1] if self.modules else ""
        return self._stacks.setdefault(path, {path: (path, None)})

    def _source(self) -> str:
        """The innermost line of a ``forward`` of the model, as one frame of a traceback."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self._root:
            code = frame.f_code
            if code.co_name == "forward" and is_users(code.co_filename):
                text = linecache.getline(code.co_filename, frame.f_lineno).strip()
                return f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    {text}'
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    # --- the end ---

    def finish(self, results: Sequence[torch.Tensor | None], descs: Sequence[Any]) -> None:
        """Ends the graph, and leaves out what nobody reads.

        Raises:
            Unusual: the recording is of no use.
        """
        self.check()
        nodes = [None if t is None else self.node_of(t) for t in results]
        self.graph.output(tuple(nodes)).meta["desc"] = list(descs)
        self.graph.eliminate_dead_code()
        alive = set(self.graph.nodes)
        for node, out in self._results:
            if node in alive:
                node.meta["val"] = self._fake(out)
        for held in (self._tensors, self._results, self._nodes, self._part_of, self._late):
            held.clear()  # type: ignore[attr-defined]

    def check(self) -> None:
        """Stop here where the recording is of no use."""
        if self.unusual:
            raise Unusual(self.unusual)

    def _fake(self, out: Any) -> Any:
        if isinstance(out, list | tuple):
            return type(out)([self._fake(x) for x in out])
        return fake_as(out, self._mode) if isinstance(out, torch.Tensor) else out


# --- while a model runs -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched_modules(root: nn.Module, recorder: Recorder) -> Iterator[None]:
    """While entered, the recorder knows which module of ``root`` runs.

    Raises:
        Unusual: a module has two names.
    """
    named = list(root.named_modules(remove_duplicate=False))
    paths = {module: name for name, module in named}
    if len(paths) < len(named):
        raise Unusual("a module is used under two names")

    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.check()
        if recorder.in_backward:
            raise Unusual("a module runs in the backward")
        recorder.modules.append(paths.get(self, recorder.modules[-1] if recorder.modules else ""))
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.modules.pop()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def watch_backward(ends: Sequence[torch.Tensor], recorder: Recorder) -> None:
    """From now on the recorder knows which autograd node behind ``ends`` runs."""

    def move(number: int | None, *_: Any) -> None:
        recorder.differentiates = number

    pending = [x.grad_fn for x in ends]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        node.register_prehook(partial(move, node._sequence_nr()))  # type: ignore[attr-defined]
        node.register_hook(partial(move, None))
        new = [n for n, _ in node.next_functions if n not in seen]
        seen.update(new)
        pending += new
