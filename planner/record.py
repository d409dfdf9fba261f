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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed

from meshwright.planner.faking import fake_as
from meshwright.planner.joint import written
from meshwright.planner.provenance import is_users
from meshwright.planner.remember import Remembering, Results
from meshwright.planner.schema import Unusual, functional, gives_view, without_defaults
from meshwright.planner.script import Made, Script, Slot, Writing, call_kind, tensors_of

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default


_SCATTER = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""A part of a tensor to the op that gives the tensor with another part in its place."""


# --- the recorder -------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Writes every op into a graph.

    Args:
        mode: of the fake tensors.
        decompositions: overload to what is done in its place.
        root: code of the function whose frame is the outermost of the model's.
        results: what ops give, as far as that is known; what is learnt is added.

    Attributes:
        graph: what was recorded.
        holder: holds the constants, as attributes named by ``get_attr`` nodes.
        in_backward: whether the backward runs.
        modules: dotted paths of the modules that run, innermost last.
        differentiates: in the backward, the number of the autograd node that runs; None between two of them.
        unusual: why the recording is of no use, or ``""``.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        decompositions: Mapping[Any, Callable[..., Any]],
        root: CodeType,
        results: Results | None = None,
    ):
        super().__init__()
        self.graph = fx.Graph()
        self.holder = nn.Module()
        self.in_backward = False
        self.modules: list[str] = []
        self.differentiates: int | None = None
        self.unusual = ""
        self._mode, self._decompositions, self._root = mode, decompositions, root
        self._run = Remembering(mode, views=False, results=results)
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
        self._scripts: dict[Hashable, Script | None] = {}
        self._writing: Writing | None = None
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
        for way, apart in (
            (self._run_apart, self._composite(func, args, kwargs)),
            (self._scripted, self._decompositions.get(func)),
        ):
            if apart is not None:
                done = way(apart, func, args, kwargs)
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

    def _run_apart(self, apart: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return apart(*args, **kwargs)

    def _scripted(self, apart: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """As :meth:`_run_apart`, from the script of an earlier call of the same kind where there is one."""
        tensors = tensors_of((args, kwargs))
        changed = any(self._memory.get(id(t)) in self._written for t in tensors)
        key = None if changed or self._writing is not None else call_kind(func, args, kwargs, tensors)
        if key is None:
            return self._run_apart(apart, func, args, kwargs)
        known = self._scripts.get(key)
        if known is not None:
            return self._read_out(known, tensors)
        if key in self._scripts:
            return self._run_apart(apart, func, args, kwargs)
        self._writing = writing = Writing(tensors)
        try:
            done = self._run_apart(apart, func, args, kwargs)
        finally:
            self._writing = None
        self._scripts[key] = writing.end(done)
        return done

    def _read_out(self, script: Script, tensors: Sequence[torch.Tensor]) -> Any:
        """Write down what a script says, for these tensors as its arguments."""
        nodes: list[fx.Node] = []
        seen = dict(enumerate(tensors))
        meta = self._provenance()

        def node(x: Any) -> Any:
            if type(x) is Slot:
                return nodes[x.number - len(tensors)] if x.number >= len(tensors) else self.node_of(tensors[x.number])
            return [node(y) for y in x] if isinstance(x, list | tuple) else x

        for step in script.steps:
            if not isinstance(step, Made):
                self._write(seen[step.argument], seen[step.new])
                continue
            args, kwargs = tuple(map(node, step.args)), {k: node(v) for k, v in step.kwargs.items()}
            for made, out in self._nodes_of(step.func, args, kwargs, step.out, meta):
                if (slot := len(tensors) + len(nodes)) in script.seen:
                    seen[slot] = fake_as(out, self._mode)
                    self._know(seen[slot], made)
                nodes.append(made)
        return script.given(seen)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        said_args, said_kwargs = without_defaults(func, args, kwargs)
        if gives_view(func) and self._memory.get(id(args[0])) in self._written:
            return self._view_of_written(func, args, kwargs, said_args, said_kwargs)
        new_args = tuple(map(self._argument, said_args))
        new_kwargs = {k: self._argument(v) for k, v in said_kwargs.items()}
        out = self._run(func, args, kwargs)
        several = isinstance(out, list | tuple)
        if not isinstance(out, torch.Tensor) and not (several and any(isinstance(x, torch.Tensor) for x in out)):
            self._not_in_script()
            return out
        if self._writing is not None:
            self._writing.op(func, said_args, said_kwargs, out)
        for node, made in self._nodes_of(func, new_args, new_kwargs, out):
            self._know(made, node)
        if not several and func in _SCATTER:
            self._part_of[id(out)] = (func, args[0], said_args[1:])
        return out

    def _nodes_of(
        self, func: Any, args: Any, kwargs: Any, out: Any, meta: dict[str, Any] | None = None
    ) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """Writes an op down; the node of every tensor that it gives."""
        node = self._node(func, args, kwargs, out, meta)
        if isinstance(out, torch.Tensor):
            yield node, out
            return
        for i, made in enumerate(out):
            if isinstance(made, torch.Tensor):
                item = written(self.graph, operator.getitem, (node, i), {}, "getitem", node.meta)
                self._results.append((item, made))
                yield item, made

    def _view_of_written(self, func: Any, args: Any, kwargs: Any, said_args: Any, said_kwargs: Any) -> torch.Tensor:
        self._not_in_script()
        out = func(*args, **kwargs)
        self._late[id(out)] = (func, said_args, said_kwargs, self._provenance())
        self._hold(out)
        if func in _SCATTER:
            self._part_of[id(out)] = (func, args[0], said_args[1:])
        return out

    def _node(self, func: Any, args: Any, kwargs: Any, out: Any, meta: dict[str, Any] | None = None) -> fx.Node:
        node = written(self.graph, func, args, kwargs, func._opname, self._provenance() if meta is None else meta)
        self._results.append((node, out))
        return node

    def _argument(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.node_of(x)
        if isinstance(x, list | tuple):
            return [self._argument(y) for y in x]
        return x

    def _not_in_script(self) -> None:
        if self._writing is not None:
            self._writing.give_up()

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._native_batch_norm_legit.default:
            with self:
                *outs, mean, var = aten._native_batch_norm_legit_functional.default(*args, **kwargs)
            self._write(args[3], mean)
            self._write(args[4], var)
            return tuple(outs)
        form, tensors = functional(func), [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if args[0]._is_view() and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise Unusual("forward writes to a part of a tensor with a gradient")
        with self:
            new = form(*args, **kwargs)
            if new.dtype != args[0].dtype:
                new = aten._to_copy.default(new, dtype=args[0].dtype)
        self._write(args[0], new)
        return args[0]

    def _write(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """From now on ``tensor`` reads as ``new``, and what it is a part of has it; by other names its memory is not read."""
        if new.shape != tensor.shape:
            raise Unusual("forward writes what has another shape")
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.write(tensor, new, self._sharing.get(self._memory.get(id(tensor), 0), ()))
        while id(tensor) in self._part_of:
            target, tensor, args = self._part_of[id(tensor)]
            with self:
                new = _SCATTER[target](tensor, new, *args)
        self._writing = writing
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
