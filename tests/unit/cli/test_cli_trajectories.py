"""``rlhf trajectories`` on a run that an earlier version wrote."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_cli import main as cli

LOG = Path(__file__).parents[2] / "data" / "log-shards1-documents1"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two runs, ``run`` and ``torn``, of which a manifest is damaged; and a folder that is no run."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("run", "torn"):
        shutil.copytree(LOG / "run", root / name)
    for manifest in (root / "torn").rglob("*.json"):
        manifest.unlink()
    shutil.copy(LOG / "run" / "run.json", root / "torn" / "run.json")
    (root / "torn" / "iterations" / "00000000" / "rollout.json").write_text("{}")
    (root / "no-run").mkdir()
    return str(root)


def answered(*arguments):
    done = CliRunner().invoke(cli.app, ["trajectories", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def refused(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["rlhf", "trajectories", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_conditions_columns_order_and_limit(root):
    rows = answered(
        *("r*", "--root", root, "--where", "reward is not null", "--columns", "iteration, reward"),
        *("--order-by", "reward, iteration desc", "--limit", "2"),
    )

    assert rows == [{"iteration": 7, "reward": -1.0}, {"iteration": 1, "reward": 1.0}]


def test_a_question_has_no_limit_of_its_own(root):
    rows = answered(f"{root}/run", "--sql", "select a.answer from trajectories a cross join trajectories b")

    assert len(rows) == 49


def test_all_runs_below_a_root_and_what_cannot_be_read_of_them(root, monkeypatch, capsys):
    message = refused(monkeypatch, capsys, "--root", root)

    assert message.startswith(f"CorruptShardError: file://{root}/torn/iterations/00000000/rollout.json")
    assert len(answered("--root", root, "--skip-damaged")) == 7


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("run", "--where", "rewrad < 0"), 'column "rewrad" not found'),
        (("run", "--sql", "select 1", "--where", "true", "--columns", "prompt"), "leave out --where, --columns"),
        (("run", "--sql", "copy (select 1) to 'x'"), "one SELECT is wanted"),
        (("gone-*",), "no run 'gone-*' below"),
        (("gone",), "no run at"),
    ],
)
def test_what_cannot_be_answered_says_why(root, monkeypatch, capsys, arguments, problem):
    assert problem in refused(monkeypatch, capsys, *arguments, "--root", root)
