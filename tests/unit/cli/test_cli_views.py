"""Plots and tables for people."""

import io

import numpy as np
import pytest
from rich.console import Console

from rlhf_cli.views import curve, printable, samples_table, show_table, show_trajectories
from rlhf_core.records import ActionRange, SamplingParams, Stage, StageManifest, StopReason, Trajectory, VersionSpan
from rlhf_core.storage import RunStore, query_trajectories, trajectories


def console():
    return Console(file=io.StringIO(), width=100, highlight=False)


def shown(out):
    return out.file.getvalue()


# --- curve


@pytest.mark.parametrize("count", [31, 60, 61, 1000])
def test_a_long_series_fits_a_terminal(count):
    lines = curve([float(i) for i in range(count)])

    assert max(len(line) for line in lines) <= 80
    assert f"{count - 1}  iteration" in lines[-1]


def test_a_rising_series():
    assert curve([0.0, 0.5, 1.0], height=2) == [
        "   1.000 │  ▁▁██",
        "   0.000 │▁▁████",
        "         └──────",
        "          0   2  iteration",
    ]


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [-3.0, 2.0], [float(i) for i in range(120)]])
def test_every_line_is_as_wide_as_the_axis(values):
    *plot, axis, _ = curve(values)

    assert len(plot) == 8
    assert {len(line) for line in plot} == {len(axis)}
    assert len(axis) <= min(10 + 2 * len(values), 80)


@pytest.mark.parametrize("count", [2, 11, 101])
def test_the_last_number_ends_below_the_last_value(count):
    *_, axis, numbers = curve([0.0] * count)

    assert numbers.startswith(" " * 10 + "0")
    assert len(numbers.removesuffix("  iteration")) == len(axis) - 1
    assert numbers.removesuffix("  iteration").endswith(str(count - 1))


def test_one_value_has_one_number():
    assert curve([0.5])[-1] == " " * 10 + "0  iteration"


def test_nothing_to_draw():
    assert curve([]) == []


def test_the_labels_are_highest_and_lowest():
    lines = curve([0.25, -1.5, 0.75])

    assert lines[0].startswith("   0.750 │")
    assert lines[7].startswith("  -1.500 │")


# --- texts


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("two\nlines", "two⏎lines"),
        ("a\tb\x1b[31m\x00", "a·b·[31m·"),
        ("größe 数 ✓", "größe 数 ✓"),
        ("\ud800", "·"),
        ("", ""),
    ],
)
def test_printable(text, line):
    """CASE 111: odd text does not reach the terminal as it is."""
    assert printable(text) == line


@pytest.mark.parametrize("text", ["[/b] and [red]", "[INST] hi [/INST]"])
def test_an_answer_is_no_markup(text):
    out = console()

    out.print(samples_table("after", [{"prompt": text, "answer": text, "reward": 0.12345}]))

    assert shown(out).count(text) == 2
    assert "0.1235" in shown(out)


# --- trajectories of a run


def trajectory(sample, answer, reward):
    return Trajectory(
        run_id="run",
        iteration=0,
        prompt_id="row-0",
        group_id="g0",
        sample_index=sample,
        datasource="sums",
        prompt="1 + 1\n=",
        label=2,
        token_ids=np.arange(4, dtype=np.int32),
        action_ranges=(ActionRange(2, 4),),
        rollout_logprobs=np.array([0, 0, -0.5, -0.5], np.float32),
        version_spans=(VersionSpan(2, 4, 0),),
        stop_reason=StopReason.EOS,
        sampling=SamplingParams(max_tokens=8),
        answer=answer,
    )


@pytest.fixture
def store(tmp_path):
    store = RunStore("run", str(tmp_path))
    part = store.publish_trajectories(0, [trajectory(0, "[/b] 2", 1.0), trajectory(1, "\x1b[2J", 0.0)])
    store.commit(StageManifest("run", 0, Stage.ROLLOUT, (part,), 2, 8, 0))
    return store


def test_samples_are_printed_one_line_each(store):
    out = console()

    show_trajectories(out, trajectories(store), as_json=False)

    lines = shown(out).splitlines()
    assert [line for line in lines if line.startswith("  ")] == ["  > 1 + 1⏎=", "  < [/b] 2", "  > 1 + 1⏎=", "  < ·[2J"]
    assert "sample_index=0" in lines[0]


def test_samples_as_json(store):
    import json

    out = console()

    show_trajectories(out, trajectories(store, where="sample_index = 1"), as_json=True)

    [row] = json.loads(shown(out))
    assert (row["sample_index"], row["answer"]) == (1, "\x1b[2J")


def test_nothing_matches(store):
    out = console()

    show_trajectories(out, trajectories(store, limit=0), as_json=False)

    assert shown(out) == "no trajectory matches\n"


def test_any_table_is_printed_with_its_columns(store):
    out = console()

    show_table(
        out,
        query_trajectories(
            store, "select stop_reason, count(*) as n, null as none, '[b]' as b from trajectories group by all"
        ),
        as_json=False,
    )

    assert [line.split() for line in shown(out).splitlines() if "eos" in line or "stop" in line] == [
        ["stop_reason", "n", "none", "b"],
        ["eos", "2", "[b]"],
    ]
