"""What ops give on fake tensors, remembered: the same shapes, strides, types and sharing of memory as if they were run."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.planner.faking import fake_as, fake_of, form_of
from meshwright.planner.remember import Remembering

aten = torch.ops.aten

CALLS = {
    "pointwise": (aten.add.Tensor, lambda x: (x, x)),
    "cast": (aten._to_copy.default, lambda x: (x,)),
    "reduction": (aten.sum.dim_IntList, lambda x: (x, [0], True)),
    "several": (aten.topk.default, lambda x: (x, 1)),
    "transposed": (aten.t.default, lambda x: (x,)),
    "a part": (aten.slice.Tensor, lambda x: (x, 1, 2, 4)),
    "a part of a part": (aten.slice.Tensor, lambda x: (x[1:], 1, 2, 4)),
    "some results are missing": (
        aten.native_layer_norm_backward.default,
        lambda x: (x, x, [5], x[:, :1], x[:, :1], None, None, [True, False, False]),
    ),
}


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_is_run(name, views):
    func, args_of = CALLS[name]
    results = {}
    for run in (0, 1, 2):
        mode = FakeTensorMode()
        with mode, torch.no_grad():
            args = args_of(torch.empty(4, 5, dtype=torch.float32))
            wanted = func(*args)
            known = len(results)
            given = Remembering(mode, views=views, results=results)(func, args, {})
        assert len(results) == 1 and known == (run > 0)
        several = isinstance(wanted, tuple | list)
        assert isinstance(given, tuple | list) is several
        for x, y in zip(given if several else [given], wanted if several else [wanted], strict=True):
            if y is None:
                assert x is None
                continue
            assert type(x) is FakeTensor and form_of(x) == form_of(y) and x.fake_mode is mode and x.device == y.device
            if not views:
                assert x.storage_offset() == y.storage_offset()
                shares = y.untyped_storage()._cdata == args[0].untyped_storage()._cdata
                assert (x.untyped_storage()._cdata == args[0].untyped_storage()._cdata) is shares


def test_what_depends_on_more_than_kinds_is_run_every_time():
    mode, ran = FakeTensorMode(), []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **(kwargs or {}))

    run = Remembering(mode)
    with mode, Counting():
        x = torch.empty(3, dtype=torch.complex64)
        conjugate = torch.ops.aten._conj.default(x)
        ran.clear()
        for _ in range(2):
            assert run(aten._conj.default, (x,), {}).is_conj()
            assert not run(aten.abs.default, (conjugate,), {}).is_complex()
            run(aten.add_.Tensor, (x, x), {})
    asked = (aten._conj.default, aten.abs.default, aten.add_.Tensor)  # a conjugate is resolved before it is read
    assert [func for func in ran if func in asked] == [*asked, *asked]


def test_views_begin_where_they_would_whatever_their_operand_begins_at():
    mode = FakeTensorMode()
    run = Remembering(mode, views=False)
    with mode, torch.no_grad():
        x = torch.empty(8, 4)
        for part in (x, x[2:6], x[4:], x, x[4:]):
            for func, args in (
                (aten.slice.Tensor, (part[:4], 0, 1, 3)),
                (aten.view.dtype, (part[:4], torch.int8)),
                (aten.as_strided.default, (part[:4], [2, 2], [4, 1], 3)),
            ):
                wanted, given = func(*args), run(func, args, {})
                assert form_of(given) == form_of(wanted) and given.storage_offset() == wanted.storage_offset()
                assert given.untyped_storage()._cdata == x.untyped_storage()._cdata
        pieces = run(aten.split.Tensor, (x, 4), {})
        assert [p.storage_offset() for p in pieces] == [0, 16]


def test_sparse_results_are_not_remembered():
    results = {}
    for _ in range(2):
        mode = FakeTensorMode()
        run = Remembering(mode, results=results)
        with mode:
            x = torch.empty(3, 4)
            sparse = run(aten._to_sparse.default, (x,), {})
            assert sparse.layout is torch.sparse_coo
            assert run(aten.sum.default, (x,), {}).shape == ()
            assert run(aten._nnz.default, (sparse,), {}) is not None
    assert len(results) == 1


def test_fakes_are_made_as_torch_makes_them():
    mode = FakeTensorMode()
    with mode:
        theirs = torch.empty(4, 5).t()
    for ours in (fake_as(theirs, mode), fake_of(form_of(theirs), mode)):
        assert form_of(ours) == form_of(theirs) and vars(ours) == vars(theirs)
        assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(theirs)
        assert ours.untyped_storage()._cdata != theirs.untyped_storage()._cdata and not ours.requires_grad
