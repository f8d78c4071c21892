"""`rlhf replay --rescore` and `rlhf export`: what people type and see."""

import io
import json
import sys

import pytest
from rich.console import Console
from saved_run import save_run
from typer.testing import CliRunner

from rlhf_cli import main as cli
from rlhf_cli.rescore import show_report

RUN = [[("g0", [("12", 1.0), ("[/b] a", 0.0)]), ("g1", [("b", 0.5), (None, None)])]]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    save_run(tmp_path / "runs", RUN)
    return tmp_path


def failing(monkeypatch, capsys, *arguments):
    """Exit code and stderr of the whole command."""
    monkeypatch.setattr(sys, "argv", ["rlhf", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code, capsys.readouterr().err


def test_an_export_says_what_it_wrote_and_what_not(place):
    done = CliRunner().invoke(cli.app, ["export", "run", "--root", "runs", "--format", "hf", "-o", "all"])
    as_json = CliRunner().invoke(cli.app, ["export", f"{place}/runs/run", "--format", "hf", "-o", "again", "--json"])

    assert done.exit_code == 0
    assert done.stdout.splitlines() == [f"4 rows from 4 samples: file://{place}/all"]
    written = json.loads(as_json.stdout)
    assert (written["rows"], written["source"]["run_id"], len(written["manifests"])) == (4, "run", 2)
    assert json.loads((place / "again.provenance.json").read_text())["files"] == written["files"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "--format", "sft", "-o", "x.txt"),
            "ConfigError: --output 'x.txt': end its name with .jsonl or .parquet",
        ),
        (("gone", "--format", "sft", "-o", "x.jsonl"), "ConfigError: no run at file://"),
        (("run", "--format", "hf", "-o", "runs"), "runs is there already"),
        (("run", "--format", "hf", "-o", "x", "--where", "reward > 5"), "DataError: "),
    ],
)
def test_a_mistake_of_an_export_is_one_message(monkeypatch, capsys, arguments, message):
    code, text = failing(monkeypatch, capsys, "export", *arguments, "--root", "runs")

    assert (code, message in text) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--rescore", "digitz"), "ConfigError: 'digitz' is no reward"),
        (("gone", "--rescore", "digits"), "ConfigError: no run at file://"),
        (("run", "--rescore", "gone.py"), "no such file"),
        (("run", "--rescore", "digits", "--iterations", "3..4"), "it has 0..0"),
        (("run", "--rescore", "digits", "--name", "a/b"), "cannot name a rescoring"),
    ],
)
def test_a_mistake_of_a_rescoring_starts_nothing(monkeypatch, capsys, place, arguments, message):
    code, text = failing(monkeypatch, capsys, "replay", *arguments, "--root", "runs")

    assert (code, message in text) == (1, True)
    assert not (place / "runs" / "run" / "rescored").exists()


def test_a_comparison_for_people():
    out = Console(file=io.StringIO(), width=100, highlight=False)
    numbers = {"mean": 0.5, "std": 0.1, "min": 0.0, "max": 1.0}
    moved = {"old": 0.0, "new": 5.0, "moved": 0.5, "prompt": "Q\n", "answer": "[/b] \x1b[2J größe"}
    show_report(
        out,
        {
            "run_id": "run",
            "name": "mine-12345678",
            "iterations": [0, 1],
            "samples": 4,
            "failed_rollouts": 1,
            "unscored_in_run": 0,
            "compared": 3,
            "groups": 2,
            "old": numbers,
            "new": numbers,
            "pearson": None,
            "spearman": 0.25,
            "advantage_sign_changed": 0.5,
            "order_changed": None,
            "pairs_swapped": 1 / 3,
            "failures": {"error: [red] no": 2},
            "moved": [moved],
            "old_normalised": True,
            "plot": "file:///x.png",
            "storage": "file:///x",
            "tracker": None,
        },
    )

    text = out.file.getvalue()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Pearson correlation -" in lines
    assert "Spearman correlation 0.25" in lines
    assert "changed sides of their group's mean 50.0%" in lines
    assert "2 failed: error: [red] no" in lines
    assert "0 5 +0.50 Q⏎ [/b] ·[2J größe" in lines
    assert "the run's rewards are normalised" in text
