"""Curves in TensorBoard's own files, read back by its own reader."""

import json
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_core.lineage.tensorboard import TensorBoardTracker


@pytest.fixture
def begin(tmp_path):
    """A new attempt at the run."""

    def start():
        tracker = TensorBoardTracker(str(tmp_path))
        tracker.start("run", {}, {})
        return tracker

    return start


def drawn(folder, tag):
    """(step, value) of each point, as TensorBoard draws them."""
    reader = EventAccumulator(str(folder / "run"))
    reader.Reload()
    return [(point.step, point.value) for point in reader.Scalars(tag)] if tag in reader.Tags()["scalars"] else []


def tell(tracker, *iterations):
    for iteration in iterations:
        tracker.log_iteration(iteration, {"reward/mean": iteration / 4, "eval/pass@2": 0.5}, [], 100.0 + iteration)


def test_points_have_the_step_and_the_time_of_the_log(begin, tmp_path):
    tracker = begin()
    tell(tracker, 0, 1)
    tracker.log_evaluation(2, {"eval/score_mean": 0.75}, 300.0)
    tracker.finish(succeeded=True)

    reader = EventAccumulator(str(tmp_path / "run"))
    reader.Reload()
    points = [(point.step, point.value, point.wall_time) for point in reader.Scalars("reward/mean")]
    assert points == [(0, 0.0, 100.0), (1, 0.25, 101.0)]
    assert drawn(tmp_path, "eval/score_mean") == [(2, 0.75)]
    assert drawn(tmp_path, "eval/pass@2") == [(0, 0.5), (1, 0.5)]


def test_a_resumed_run_goes_on_where_the_files_end(begin, tmp_path):
    tell(begin(), 0, 1)  # killed: never closed
    again = begin()

    assert again.logged_iterations() == 2
    tell(again, 2)
    assert drawn(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_what_was_written_and_not_noted_is_not_drawn_twice(begin, tmp_path):
    """Killed between the points and the note: they are written again."""
    first = begin()
    tell(first, 0, 1, 2)
    (tmp_path / "run" / "told.json").write_text(json.dumps({"iterations": 1, "evaluated": -1}))

    tell(begin(), 1, 2)

    assert drawn(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_without_the_note_all_is_told_again_and_drawn_once(begin, tmp_path):
    tell(begin(), 0, 1)
    (tmp_path / "run" / "told.json").unlink()
    again = begin()

    assert again.logged_iterations() == 0
    tell(again, 0, 1)
    assert drawn(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.25)]


def test_an_evaluation_told_many_times_is_one_point_also_after_a_restart(begin, tmp_path):
    first = begin()
    tell(first, 0)
    for tracker in (first, first, begin()):
        tracker.log_evaluation(1, {"eval/score_mean": 0.5}, 200.0)

    assert drawn(tmp_path, "eval/score_mean") == [(1, 0.5)]


def test_neither_torch_nor_tensorflow_is_loaded():
    look = "import sys, rlhf_core.lineage.tensorboard; print([n for n in ('torch', 'tensorflow') if n in sys.modules])"

    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip() == "[]"
