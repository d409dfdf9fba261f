"""The report: a golden text of a hand-made plan, and the pieces it is made of."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from meshwright.planner.ir.errors import InputError
from meshwright.planner.ir.plan import Plan
from meshwright.report.fold import fold
from meshwright.report.units import parse_bytes
from tests.helpers.golden import check_golden
from tests.helpers.plans import sample_plan


def test_report_of_a_training_plan_equals_the_golden_text():
    check_golden("report.txt", sample_plan().report(width=110))


def test_report_of_a_plan_without_anything_to_fold_or_communicate():
    plan = replace(sample_plan(), collectives=(), alternatives=(), fallbacks=(), notes=(), training=False, gap=0.0)
    text = plan.report(width=110)
    assert "No communication." in text and "proved optimal" in text and "inference" in text
    assert "Named strategies" not in text and "Notes" not in text


def test_a_loaded_plan_gives_the_same_report():
    plan = sample_plan()
    assert Plan.from_json(plan.to_json()).report(width=100) == plan.report(width=100)


@pytest.mark.parametrize("width", [50, 80, 200])
def test_no_line_is_wider_than_asked(width):
    assert max(map(len, sample_plan().report(width=width).splitlines())) <= width


def test_layers_fold_only_where_everything_is_equal():
    names = [(f"h.{i}.w", "a" if i not in (2, 5) else "b") for i in range(7)] + [("head", "a")]
    assert [(g.name, len(g.members)) for g in fold(names)] == [("h.[0-1,3-4,6].w", 5), ("h.[2,5].w", 2), ("head", 1)]


def test_numbers_inside_words_do_not_fold():
    assert [g.name for g in fold([("conv1.w", 0), ("conv2.w", 0), ("0.w", 0), ("1.w", 0)])] == ["conv1.w", "conv2.w", "*.w"]


def test_memory_text_that_is_no_size_is_an_input_error():
    with pytest.raises(InputError, match=re.escape("memory '80 apples' is not a positive size: write bytes, '60GB'")):
        parse_bytes("80 apples")
