"""The timeline, by hand::

seconds    0    10   20   30   40        1000 1010
rollout    ▇▇0▇▇▇    ▇▇1▇▇▇
update          ▇▇0▇▇▇                   ▇1▇          a pause of 960 s, and an overlap of 5
"""

import re

import pytest

from rlhf_core.report.run_log import Span
from rlhf_core.report.timeline import LEFT, RIGHT, WIDTH, Clock, duration, merged, overlap, timeline_of

SPANS = [
    Span("rollout", 0, 0, 10),
    Span("update", 0, 10, 25),
    Span("rollout", 1, 20, 40),
    Span("update", 1, 1000, 1010),
    Span("evaluate", 2, 1010, 1011),
]


def test_union_and_overlap():
    assert merged([(5, 9), (0, 3), (3, 4), (8, 12)]) == [(0, 4), (5, 12)]
    assert overlap([(0, 4), (5, 12)], [(3, 6), (11, 20)]) == 1 + 1 + 1


def test_what_the_stages_took():
    timeline = timeline_of(SPANS)

    rows = {row.stage: row for row in timeline.table}
    assert list(rows) == ["rollout", "update", "evaluate"]
    assert timeline.working == 40 + 11
    assert (rows["rollout"].seconds, rows["rollout"].longest_of, rows["rollout"].share) == (
        30,
        1,
        pytest.approx(30 / 51),
    )
    assert timeline.overlap == pytest.approx(5 / 51)


def test_a_pause_is_cut_out_and_marked():
    clock = Clock(merged((span.start, span.end) for span in SPANS))

    [(place, seconds)] = clock.pauses()
    assert (clock.x(0), clock.x(1011)) == (LEFT, pytest.approx(WIDTH - RIGHT))
    assert seconds == 960
    assert clock.x(40) < place < clock.x(1000) < clock.x(40) + 0.05 * WIDTH
    assert "nothing was at work for 16 min 00 s" in timeline_of(SPANS).whole


def test_hundreds_of_pauses_leave_room_for_the_work():
    clock = Clock([(k * 1000.0, k * 1000.0 + 1) for k in range(500)])

    assert clock.x(499_001) == pytest.approx(WIDTH - RIGHT)
    assert sum(clock.x(k * 1000 + 1) - clock.x(k * 1000) for k in range(500)) > 0.7 * (WIDTH - LEFT - RIGHT)


def test_the_evaluation_of_a_version_stands_with_the_iteration_that_made_it():
    newest = timeline_of(SPANS).newest

    assert re.findall(r'class="lane"[^>]*>([^<]+)', newest) == ["iteration 0", "iteration 1"]
    assert "evaluate of iteration 1: 1 s" in newest


def test_bars_of_a_long_run_are_bounded():
    spans = [Span("rollout", k, 2.0 * k, 2.0 * k + 1) for k in range(20_000)]

    assert len(timeline_of(spans).whole) < 200_000


def test_no_span_no_timeline():
    assert timeline_of([]) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.05, "0.05 s"), (119, "119 s"), (150, "2 min 30 s"), (7260, "2 h 01 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
