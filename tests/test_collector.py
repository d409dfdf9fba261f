"""The garbage collector is paused while planning, and afterwards as the user had it."""

from __future__ import annotations

import gc

import pytest

from meshwright.planner.ir import collector


def test_collection_is_off_inside_and_on_again_afterwards():
    assert gc.isenabled()
    with collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_comes_back_after_an_error_and_nests():
    with pytest.raises(ValueError), collector.paused():
        with collector.paused():
            pass
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_a_user_who_switched_it_off_keeps_it_off():
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_inside_is_old_afterwards():
    with collector.paused():
        made = [[] for _ in range(3)]
    assert any(x is made for x in gc.get_objects(generation=2))


def test_what_a_user_froze_stays_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with collector.paused():
            pass
        assert gc.get_freeze_count() == count > 0
    finally:
        gc.unfreeze()
