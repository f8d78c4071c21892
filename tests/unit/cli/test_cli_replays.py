"""``rlhf replay``: which options go together, and what people read."""

import pytest
import typer

from rlhf_cli import replays
from rlhf_cli.arguments import out
from rlhf_cli.replay import check_options
from rlhf_core.errors import ConfigError
from rlhf_core.storage import RunStore


@pytest.mark.parametrize(
    "given",
    [["--reproduce", "--rewards", "--keep"], ["--set", "--run-id", "--iterations"], ["--rescore", "--set", "--name"]],
)
def test_options_of_one_mode_go_together(given):
    check_options(given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "none is given"),
        (["--reproduce", "--set"], "--set cannot be used with --reproduce"),
        (["--rescore", "--run-id"], "--run-id cannot be used with --rescore"),
        (["--set", "--keep", "--rewards"], "--keep, --rewards cannot be used with --set"),
    ],
)
def test_an_option_of_another_mode_is_refused_never_ignored(given, problem):
    with pytest.raises(ConfigError, match=problem):
        check_options(given)


def row(iteration, experience, *notes):
    return {
        "iteration": iteration,
        "rewards": "recorded",
        "experience": experience,
        "weights": experience,
        "notes": list(notes),
    }


@pytest.fixture
def reproduced(monkeypatch, tmp_path):
    """The command, with this as what the flow found; nothing is run."""
    store = RunStore("night", str(tmp_path))
    monkeypatch.setattr(replays, "find_run", lambda run, root: store)
    monkeypatch.setattr("rlhf_core.cluster.replay.find_source", lambda source: ({}, None))
    monkeypatch.setattr("rlhf_core.cluster.replay.check_done", lambda source, first, last: None)

    def run(rows, changed, **options):
        result = {
            "source": store.url,
            "same": all(r["experience"] == "same" for r in rows),
            "iterations": rows,
            "changed_since": changed,
            "scratch": None,
        }
        monkeypatch.setattr("rlhf_cli.here.run_flow_here", lambda *parameters, **named: result)
        settings = {"score": False, "scratch_root": None, "keep": False, "root": None, "as_json": False} | options
        with out.capture() as shown:
            try:
                replays.reproduce_here("night", "0..1", **settings)
                code = 0
            except typer.Exit as ended:
                code = ended.exit_code
        return code, shown.get()

    return run


def test_what_is_the_same_says_so(reproduced):
    code, shown = reproduced([row(0, "same"), row(1, "same")], [])

    assert code == 0
    assert "reproduced: every digest is the recorded one" in shown


def test_what_differs_is_named_and_the_command_fails(reproduced):
    code, shown = reproduced(
        [row(0, "same"), row(1, "different", "weights: policy a then, b now")], ["code.dirty: False then"]
    )

    assert code == 1
    assert "iteration 1: weights: policy a then, b now" in shown
    assert "code.dirty: False then" in shown


def test_a_difference_without_a_known_cause_says_that_too(reproduced):
    _, shown = reproduced([row(0, "different", "x")], [])

    assert "neither code, packages nor machine have changed" in shown


def test_a_scratch_run_is_named_within_the_limit():
    assert len(replays._named(RunStore("r" * 128, "memory://x"), "reproduce-20300101-000000")) == 128
