"""Metric names that MLflow takes."""

import pytest

from rlhf_core.lineage import metric_name
from rlhf_core.lineage.names import MAX_NAME


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        # CASE 116
        ("timing(s)/gen", "timing_x28s_x29/gen"),
        ("val/mean@8", "val/mean_at_8"),
        ("a,b", "a_x2cb"),
        ("größe", "gr_xf6_xdfe"),
        # what is fine stays
        ("eval/pass_at_1", "eval/pass_at_1"),
        ("a-b.c:d/e f_9", "a-b.c:d/e f_9"),
        # names that would be another path
        ("a//b", "a/_/b"),
        ("/a/", "_/a/_"),
        ("", "_"),
        ("a/../b", "a/_x2e./b"),
        ("./a", "_x2e/a"),
        ("a.b/c.", "a.b/c."),
    ],
)
def test_the_mapping(name, mapped):
    assert metric_name(name) == mapped


@pytest.mark.parametrize("name", ["timing(s)/gen", "val/mean@8", "größe", "a//b", "..", "x" * 300])
def test_mapping_twice_changes_nothing_more(name):
    assert metric_name(metric_name(name)) == metric_name(name)


def test_a_long_name_is_cut():
    assert len(metric_name("x" * 300)) == MAX_NAME


def test_names_that_differ_in_a_refused_character_stay_apart():
    assert len({metric_name(name) for name in ("a(", "a)", "a,", "a@", "a_")}) == 5
