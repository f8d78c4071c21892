"""Chains and supervised runs on the command line, as far as they go before anything starts; and what is shown at the end."""

import io
import json
import sys

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from rlhf_cli import main as cli
from rlhf_cli.views import show_chain
from rlhf_core.storage import RunStore

SFT = "model: {model_name_or_path: builtin:tiny}\ndata: {dataset: rows.jsonl}\n"
PPO = "actor: {model_name_or_path: 'run:{first}'}\ndata: {prompt_dataset: p.jsonl}\nreward: {functions: [{use: digits}]}\n"
CHAIN = "stages:\n  - {name: first, flow: sft, config: sft.yaml}\n  - {name: second, flow: train, config: ppo.yaml}\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty project with a chain of two stages."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlhf_cli.configurations.gpus_of_this_machine", lambda: 0)
    for name, text in (("sft", SFT), ("ppo", PPO), ("chain", CHAIN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def rlhf(*arguments):
    return CliRunner().invoke(cli.app, [*arguments])


def test_check_says_what_each_stage_asks_for():
    done = rlhf("config", "check", "-c", "chain.yaml", "second:vllm.num_engines=2")

    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert (done.exit_code, heads) == (
        0,
        [
            "chain.yaml: stage first: valid; on this machine (cpu):",
            "chain.yaml: stage second: valid; on this machine (cpu):",
        ],
    )
    assert "engine-1" in done.stdout


def test_check_takes_a_supervised_file():
    done = rlhf("config", "check", "-c", "sft.yaml", "model.num_gpus_per_node=2")

    first, _, _, *slots = done.stdout.splitlines()
    assert (done.exit_code, first) == (0, "sft.yaml: valid; on this machine (cpu):")
    assert [slot.split()[-1] for slot in slots] == ["model-0", "model-1"]


def test_show_gives_each_stage_as_it_will_run():
    tree = yaml.safe_load(rlhf("config", "show", "-c", "chain.yaml", "train.seed=7").stdout)

    assert {name: stage["train"]["seed"] for name, stage in tree.items()} == {"first": 7, "second": 7}
    assert tree["second"]["actor"]["model_name_or_path"] == "run:CHAIN-first"


@pytest.mark.parametrize(
    ("command", "file", "override", "problem"),
    [
        ("chain", "chain.yaml", "second:rollout.batch_size=0", "stages.1 (second)"),
        ("chain", "sft.yaml", "train.seed=1", "stages is missing: set it"),
        ("sft", "sft.yaml", "train.batch_siz=1", "did you mean train.batch_size?"),
        ("reward-model", "ppo.yaml", "train.seed=1", "unknown key 'actor'"),
        ("dpo", "sft.yaml", "dpo.beta=0", "dpo.beta=0"),
        ("train", "sft.yaml", "train.seed=1", "unknown key 'model'"),
    ],
)
def test_a_mistake_starts_nothing(monkeypatch, capsys, place, command, file, override, problem):
    monkeypatch.setattr(sys, "argv", ["rlhf", command, "-c", file, override])

    with pytest.raises(SystemExit):
        cli.main()

    assert problem in capsys.readouterr().err
    assert not (place / "home").exists()


@pytest.mark.parametrize("flow", ["sft", "reward-model", "dpo", "train"])
def test_launching_without_a_stack_says_what_to_do(monkeypatch, capsys, flow):
    monkeypatch.setattr(sys, "argv", ["rlhf", "launch", "-c", "sft.yaml", "--flow", flow])

    with pytest.raises(SystemExit):
        cli.main()

    assert f"start it with `rlhf up`, or use `rlhf {flow}`" in capsys.readouterr().err


def test_what_is_shown_at_the_end():
    out = Console(file=io.StringIO(), width=120)
    stage = {"stage": "ppo", "run_id": "demo-ppo", "version": 15, "optimizer_steps": 14}
    headlines = [
        {"metric": "reward/mean", "first": -2.25, "last": 6.5},
        {"metric": "reward_log/digits", "first": 0.5, "last": 0.875},
    ]
    nothing = {"stage": "sft", "run_id": "demo-sft", "version": 0, "optimizer_steps": 0, "headlines": []}

    show_chain(
        out,
        {"chain_id": "demo", "stages": [nothing, {**stage, "headlines": headlines}], "lineage": ["demo-ppo", "└─ [b]"]},
    )

    lines = [line.replace("│", " ").split() for line in out.file.getvalue().splitlines()]
    assert ["sft", "demo-sft", "0", "0"] in lines
    assert ["ppo", "demo-ppo", "15", "14", "reward/mean", "-2.25", "6.5"] in lines
    assert ["reward_log/digits", "0.5", "0.875"] in lines
    assert out.file.getvalue().endswith("demo-ppo\n└─ [b]\n")


def test_the_lineage_of_a_run(place):
    body = {
        "kind": "sft",
        "created_at": "2026",
        "plan": {"fingerprint": "f"},
        "config": {"data": {"dataset": ["rows"]}},
    }
    RunStore("first", str(place)).write_run({**body, "models": {"policy": {"spec": "builtin:tiny"}}})

    shown, structured = rlhf("lineage", f"{place}/first"), rlhf("lineage", "first", "--root", str(place), "--json")

    assert shown.stdout.splitlines()[:2] == ["first: SFT on rows (fingerprint f)", "└─ policy: builtin:tiny"]
    assert json.loads(structured.stdout)["models"][0]["spec"] == "builtin:tiny"
