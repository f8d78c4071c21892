"""The `rlhf` command."""

import sys

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_cli import main as cli
from rlhf_core.config import load_config

GOOD = (
    "actor: {model_name_or_path: builtin:tiny}\ndata: {prompt_dataset: p.jsonl}\nreward: {functions: [{use: digits}]}\n"
)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty project with one good configuration."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlhf_cli.configurations.gpus_of_this_machine", lambda: 0)
    (tmp_path / "good.yaml").write_text(GOOD)
    return tmp_path


def rlhf(*arguments):
    return CliRunner().invoke(cli.app, [*arguments])


def failing(monkeypatch, capsys, *arguments):
    """Exit code and stderr of the whole command."""
    monkeypatch.setattr(sys, "argv", ["rlhf", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code, capsys.readouterr().err


def test_show_prints_the_whole_tree_as_yaml():
    done = rlhf("config", "show", "-c", "good.yaml", "rollout.batch_size=4", "data.input_template='[INST] {} [/INST]'")

    tree = yaml.safe_load(done.stdout)
    assert done.exit_code == 0
    assert (tree["rollout"]["batch_size"], tree["data"]["input_template"]) == (4, "[INST] {} [/INST]")
    assert tree["train"]["seed"] == 42


def test_what_show_prints_is_a_configuration(place):
    done = rlhf("config", "show", "-c", "good.yaml", "rollout.stop=['größe', '[/b]']")
    (place / "again.yaml").write_text(done.stdout)

    assert load_config("again.yaml") == load_config("good.yaml", ["rollout.stop=['größe', '[/b]']"])


def test_check_says_what_a_run_asks_for():
    done = rlhf("config", "check", "-c", "good.yaml", "vllm.num_engines=2")

    first, machine, head, *slots = done.stdout.splitlines()
    assert (done.exit_code, first) == (0, "good.yaml: valid; on this machine (cpu):")
    assert machine.startswith("  1 node of ")
    assert head.split() == ["slot", "CPU", "engine", "policy"]
    assert [slot.split()[-1] for slot in slots[:3]] == ["engine-0", "engine-1", "policy-0"]
    assert slots[3] == "  outside the slots: rollout, scoring, 0.1 CPU each"
    assert [line.split()[0] for line in slots[4:]] == ["played", "pipeline"]


def test_check_draws_the_placement_for_a_cluster_that_is_described():
    done = rlhf("config", "check", "-c", "good.yaml", "train.colocate_all=true", "--nodes", "2", "--gpus=4", "--cpus=8")

    assert (done.exit_code, done.stdout.splitlines()[:4]) == (
        0,
        [
            "good.yaml: valid; on such a cluster (gpu):",
            "  2 nodes of 8 CPU and 4 GPU",
            "  slot  GPU  CPU  engine        policy",
            "  0       1    2  engine-0 1/2  policy-0 1/2",
        ],
    )


def test_check_refuses_a_machine_that_is_too_small(monkeypatch, capsys):
    code, message = failing(monkeypatch, capsys, "config", "check", "-c", "good.yaml", "run.device=gpu")

    assert code == 1
    assert message.startswith("ConfigError: the run needs 2 GPUs")


def test_an_error_is_one_message_without_a_traceback(monkeypatch, capsys):
    code, message = failing(
        monkeypatch, capsys, "config", "check", "-c", "good.yaml", "eval.steps=0", "rollout.stop=['[/b]', 3]"
    )

    assert code == 1
    assert (
        message == "ConfigError: good.yaml:\nrollout.stop.1=3: Input should be a valid string: put the text in quotes\n"
    )


def test_every_problem_is_shown(monkeypatch, capsys):
    _, message = failing(
        monkeypatch, capsys, "config", "check", "-c", "good.yaml", "eval.steps=0", "train.batch_size=3"
    )

    assert [line.split("=")[0] for line in message.splitlines()[1:]] == ["train.batch_size", "eval.steps"]


def test_a_message_is_no_markup(monkeypatch, capsys):
    _, message = failing(monkeypatch, capsys, "config", "check", "-c", "good.yaml", "data.input_template='[/b] [red]'")

    assert "data.input_template='[/b] [red]' must hold exactly one '{}'" in message


def test_a_missing_file(monkeypatch, capsys):
    code, message = failing(monkeypatch, capsys, "config", "show", "-c", "gone.yaml")

    assert code == 1
    assert message.startswith("ConfigError: no configuration file 'gone.yaml'")


def test_training_with_a_mistake_starts_nothing(monkeypatch, capsys, place):
    code, message = failing(monkeypatch, capsys, "train", "-c", "good.yaml", "eval.steps=0")

    assert (code, "eval.steps=0" in message) == (1, True)
    assert not (place / "home").exists()


def test_launching_without_a_stack_says_what_to_do(monkeypatch, capsys):
    code, message = failing(monkeypatch, capsys, "launch", "-c", "good.yaml")

    assert code == 1
    assert "the local stack is not running: start it with `rlhf up`" in message


def test_a_resume_mode_that_does_not_exist(monkeypatch, capsys):
    code, message = failing(monkeypatch, capsys, "train", "-c", "good.yaml", "--resume", "maybe")

    assert code == 2
    assert "maybe" in message


def test_trajectories_of_a_run_that_does_not_exist(monkeypatch, capsys):
    code, message = failing(monkeypatch, capsys, "trajectories", "nope")

    assert code == 1
    assert message.startswith("ConfigError: no run at ")
    assert "--root" in message


def test_status_of_nothing_is_a_failure():
    done = rlhf("status")

    assert done.exit_code == 1
    assert done.stdout.splitlines()[:4] == ["prefect  down", "mlflow   down", "ray      down", "worker   down"]


def test_down_before_any_up():
    assert rlhf("down").exit_code == 0


@pytest.mark.parametrize("arguments", [[], ["config"]])
def test_without_a_command_there_is_help(arguments):
    assert "Usage" in rlhf(*arguments).output
