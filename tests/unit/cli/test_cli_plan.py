"""`rlhf plan` and `rlhf report`, as they are typed."""

import json
from pathlib import Path

import pytest
from saved_run import save_run
from transformers import LlamaConfig
from typer.testing import CliRunner

from rlhf_cli import main as cli
from rlhf_core.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
GOOD = "actor: {model_name_or_path: model}\ndata: {prompt_dataset: p.jsonl}\nreward: {functions: [{use: digits}]}\n"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("rlhf_cli.configurations.gpus_of_this_machine", lambda: 0)
    LlamaConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32
    ).save_pretrained("model")
    (tmp_path / "run.yaml").write_text(GOOD)


def rlhf(*arguments):
    return CliRunner().invoke(cli.app, [*arguments])


def test_what_does_not_fit_says_what_to_change_and_exits_with_1():
    done = rlhf("plan", "-c", "run.yaml", "--nodes", "1", "--gpus", "2", "--gpu-memory", "80GiB")

    assert done.exit_code == 1
    assert "DOES NOT FIT" in done.stdout
    assert "6.74 B parameters" in done.stdout
    assert "actor.gradient_checkpointing_enable=true" in done.stdout


def test_what_it_names_fits():
    asked = ["plan", "-c", "run.yaml", "--gpus", "8", "--gpu", "H100", "--json"]
    remedies = json.loads(rlhf(*asked).stdout)["runs"][0]["remedies"]
    overrides = next(remedy["overrides"] for remedy in remedies if remedy["fits"])

    done = rlhf(*asked, *overrides)

    found = json.loads(done.stdout)
    assert (done.exit_code, found["fits"]) == (0, True)
    assert all(
        place["fits"] and place["peak"] <= place["capacity"]
        for place in found["runs"][0]["places"]
        if place["capacity"]
    )


def test_host_memory_is_checked_where_it_is_given():
    options = ["actor.gradient_checkpointing_enable=true", "train.micro_batch_size=1", "actor.num_gpus_per_node=4"]
    asked = ["plan", "-c", "run.yaml", "--gpus", "5", "--gpu", "H200", *options]

    assert rlhf(*asked).exit_code == 0
    assert rlhf(*asked, "--node-memory", "4GiB").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "80 apples"], "no size: write it as 80GiB"),
        (["--gpu-memory", "1.2.3GiB"], "no size: write it as 80GiB"),
        (["--node-memory", "0"], "no size: write it as 80GiB"),
        (["--flow", "dpo"], "trains by rewards, in one way: remove --flow"),
        (["--gpus", "1", "--gpu", "Voodoo2"], "is not known: use one of"),
        (["--gpus", "1"], "give --gpu-memory"),
        (["actor.model_name_or_path=nowhere"], "config.json"),
        (["--gpus", "1", "--gpu", "H100"], "needs 2 GPUs"),
    ],
)
def test_what_cannot_be_planned(arguments, message):
    done = rlhf("plan", "-c", "run.yaml", *arguments)

    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("name", "flow", "message"),
    [
        ("chain_tiny_cpu", "sft", "whose stages name their flows"),
        ("sft_tiny_cpu", "train", "use sft, reward-model or dpo"),
    ],
)
def test_a_flow_that_a_file_does_not_have(name, flow, message):
    done = rlhf("plan", "-c", str(CONFIGS / f"{name}.yaml"), "--flow", flow)

    assert message in str(done.exception)


@pytest.mark.parametrize("name", ["chain_tiny_cpu", "vlm_shapes_tiny_cpu", "async_tiny_cpu"])
def test_shipped_configurations_fit_a_small_machine(name):
    done = rlhf("plan", "-c", str(CONFIGS / f"{name}.yaml"), "--node-memory", "16GiB", "--json")

    found = json.loads(done.stdout)
    assert (done.exit_code, found["fits"]) == (0, True)
    assert [run["name"] for run in found["runs"]] == (["sft", "reward", "ppo"] if name.startswith("chain") else [""])
    assert all(run["models"]["policy"]["parameters"] > 50_000 for run in found["runs"])


def test_a_report_is_written_where_it_is_wanted(tmp_path):
    save_run(tmp_path / "runs", [[("g0", [("1", 1.0)])]], run_id="first")
    root = ["--root", str(tmp_path / "runs")]

    default, named, printed = (rlhf("report", "first", *root, *more) for more in ([], ["-o", "x.html"], ["-o", "-"]))

    assert default.stdout.startswith("first.html (")
    assert named.exit_code == 0
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    assert printed.stdout.startswith("<!doctype html>")


def test_a_report_of_nothing_or_into_nowhere(tmp_path):
    save_run(tmp_path / "runs", [], run_id="first")

    nowhere = rlhf("report", "first", "--root", str(tmp_path / "runs"), "-o", "no/such/folder.html")
    nothing = rlhf("report", "second", "--root", str(tmp_path / "runs"))

    assert "make it" in str(nowhere.exception)
    assert "no run at" in str(nothing.exception)
