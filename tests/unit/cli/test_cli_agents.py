"""`rlhf config check` loads the agent of the user's file, and says what plays."""

import sys

import pytest
from typer.testing import CliRunner

from rlhf_cli import main as cli

pytestmark = pytest.mark.agents

CONFIG = (
    "actor: {model_name_or_path: builtin:tiny}\ndata: {prompt_dataset: p.jsonl}\ntrain: {agent_func_path: agent.py}\n"
)
AGENT = "class AgentInstance:\n    def reset(self, states): ...\n    def step(self, states): ...\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlhf_cli.configurations.gpus_of_this_machine", lambda: 0)
    (tmp_path / "agent.yaml").write_text(CONFIG)


def test_what_plays_is_said(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)

    done = CliRunner().invoke(cli.app, ["config", "check", "-c", "agent.yaml"])

    assert done.exit_code == 0
    assert "  played by  train.agent_func_path='agent.py': AgentInstance" in done.stdout.splitlines()


def test_a_file_without_an_agent_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "agent.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", ["rlhf", "config", "check", "-c", "agent.yaml"])

    with pytest.raises(SystemExit):
        cli.main()

    assert "train.agent_func_path='agent.py': the file holds no agent" in " ".join(capsys.readouterr().err.split())
