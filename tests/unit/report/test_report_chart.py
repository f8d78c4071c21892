"""Charts: ticks and thinning by hand, noise, names that are markup, numbers that are none."""

import math
import re
from xml.etree import ElementTree

import pytest

from rlhf_core.report.chart import MOST_POINTS, Line, line_chart, number, thinned, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1.0]),
        (0.03, 0.98, [0, 0.25, 0.5, 0.75, 1.0]),
        (-3.0, 7.0, [-5, -2.5, 0, 2.5, 5, 7.5]),
        (64.0, 64.8, [64, 64.2, 64.4, 64.6, 64.8]),
    ],
)
def test_ticks_are_round_and_span_the_values(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_spike_survives_thinning():
    values = [0.0] * 10_000
    values[5_003] = 9.0

    chosen = thinned(values)

    assert len(chosen) <= MOST_POINTS + 2
    assert chosen == sorted(set(chosen))
    assert {0, 5_003, 9_999} <= set(chosen)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234567, "0.1235"), (12_345.0, "12.35k"), (3.2e7, "32M"), (5e-8, "5e-08"), (0.0, "0"), (math.nan, "nan")],
)
def test_numbers_as_people_read_them(value, text):
    assert number(value) == text


def test_names_are_text_and_the_drawing_is_xml():
    drawn = line_chart("<b>&", [Line("</svg><script>alert(1)</script>", [0, 1, 2], [1.0, math.inf, 3.0])])

    root = ElementTree.fromstring(str(drawn).replace("<svg", "<svg xmlns='x'", 1))
    assert "<script" not in drawn
    assert [dot.get("cx") for dot in root.iter("{x}circle")] == [
        "50.0",
        "350.0",
    ]  # the one that is not finite is left out


def test_noise_in_the_last_bits_is_a_flat_line():
    drawn = line_chart("ratio", [Line("ratio", [0, 1, 2], [1.0, 1.0000002, 0.9999999])])

    heights = {round(float(y)) for y in re.findall(r"[\d.]+,([\d.]+)", re.search(r'points="([^"]*)"', drawn)[1])}
    assert len(heights) == 1


def test_of_nothing_there_is_no_drawing():
    assert line_chart("nothing", [Line("nan", [0], [math.nan])]) == ""
