"""benchmarks/README.md lists every command there is, and all of them write JSON, with a ratio that is a number."""

import re
from pathlib import Path

import pytest

from benchmarks.async_overlap import PIPELINES, ratio_of
from benchmarks.report import finish_table

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
STARTED_BY_OTHERS = {"trl_loop"}  # the process of ``peers``


def commands():
    return {
        path.stem: source
        for path in FOLDER.glob("*.py")
        if "__main__" in (source := path.read_text(encoding="utf-8")) and path.stem not in STARTED_BY_OTHERS
    }


def test_the_page_lists_every_command():
    listed = re.findall(r"`python -m benchmarks\.(\w+)`", (FOLDER / "README.md").read_text(encoding="utf-8"))

    assert sorted(listed) == sorted(commands())


def test_every_command_takes_json():
    assert [name for name, source in commands().items() if '"--json"' not in source] == []


@pytest.mark.parametrize("work", ["balanced", "tailed", "both"])
def test_the_overlap_compares_two_runs_that_it_makes(work):
    made = {f"{kind}/{pipeline}" for kind in ("balanced", "tailed") if work in (kind, "both") for pipeline in PIPELINES}

    assert set(ratio_of(work)) <= made


def test_a_figure_that_is_no_number_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        finish_table("name", {"row": {"s": 1.0}}, float("nan"), {}, str(tmp_path / "figures.json"))
