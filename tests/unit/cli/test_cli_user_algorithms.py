"""`rlhf config check` loads the algorithms of the user's files."""

import sys

import pytest
from typer.testing import CliRunner

from rlhf_cli import main as cli

GOOD = (
    "actor: {model_name_or_path: builtin:tiny}\ndata: {prompt_dataset: p.jsonl}\nreward: {functions: [{use: digits}]}\n"
    "algo: {advantage: {estimator: own.py:own}}\n"
)
OWN = "from rlhf_core.algorithms.estimators import Estimator\nown = Estimator('own', lambda r: r, needs_group=True)\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlhf_cli.configurations.gpus_of_this_machine", lambda: 0)
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "own.py").write_text(OWN)


def test_what_can_be_loaded_is_valid():
    done = CliRunner().invoke(cli.app, ["config", "check", "-c", "good.yaml"])

    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "good.yaml: valid; on this machine (cpu):")


def test_what_contradicts_the_configuration_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rlhf", "config", "check", "-c", "good.yaml", "rollout.n_samples_per_prompt=1"])

    with pytest.raises(SystemExit):
        cli.main()

    assert capsys.readouterr().err.startswith(
        "ConfigError: algo.advantage.estimator='own.py:own' compares the samples of one prompt, but "
    )
