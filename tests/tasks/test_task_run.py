"""Names and documents of a run."""

from minimal_config import config
from task_samples import facts

from rlhf_core.storage import RunStore
from tasks.opening import run_document
from tasks.plan import make_plan
from tasks.run import default_run_id, resolve_config


def test_the_default_run_id_is_the_same_on_a_retry():
    first, again = (default_run_id("lively-otter", "0a1b2c3d-4e5f") for _ in range(2))

    assert first == again == "lively-otter-0a1b2c3d"


def test_the_default_run_id_names_a_folder_whatever_the_flow_run_is_called(tmp_path):
    run_id = default_run_id("Größe: 7 / lr 1e-6" * 20, "0a1b2c3d-4e5f")

    assert RunStore(run_id, str(tmp_path)).run_id == run_id
    assert run_id.endswith("-0a1b2c3d")


def test_the_run_document_says_what_ran():
    checked = config("train.seed=7")

    body = run_document(checked, "run", make_plan(checked, facts(3)), "flow-1")

    assert (body["run_id"], body["flow_run_id"], body["seed"]) == ("run", "flow-1", 7)
    assert body["plan"]["iterations"] == 1
    assert "python" in body["packages"]


def test_a_flow_takes_a_file_or_a_mapping(tmp_path):
    mapping = config().model_dump(mode="json")
    path = tmp_path / "mine.yaml"
    path.write_text("actor: {model_name_or_path: m}\ndata: {prompt_dataset: p}\nreward: {functions: [{use: digits}]}\n")

    assert resolve_config(mapping, ["rollout.batch_size=4"]).rollout.batch_size == 4
    assert resolve_config(str(path), ["rollout.batch_size=5"]).rollout.batch_size == 5
