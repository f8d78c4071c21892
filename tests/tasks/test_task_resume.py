"""Whether a run may go on: what its log holds against what is asked for."""

import pytest
from minimal_config import config
from task_samples import facts

from rlhf_core.errors import ConfigError
from rlhf_core.storage import RunStore
from tasks.opening import run_document
from tasks.plan import make_plan
from tasks.resume import check_resume, different_keys, stored_config


@pytest.fixture
def store(tmp_path):
    return RunStore("run", str(tmp_path))


def body_of(checked, flow_run_id="flow-1"):
    return {"config": checked.model_dump(mode="json"), "flow_run_id": flow_run_id}


def test_an_empty_folder_is_a_fresh_start_where_resuming_is_optional(store):
    """CASE 18: empty folder, resume=if-present."""
    check_resume(store.read_run(), config(), store, "if-present", "flow-1")


def test_an_empty_folder_is_an_error_where_the_run_must_exist(store, tmp_path):
    """CASE 18: resume=must: the message names the path."""
    with pytest.raises(ConfigError, match=rf"resume=must, but there is no run at .*{tmp_path.name}/run"):
        check_resume(store.read_run(), config(), store, "must", "flow-1")


def test_a_fresh_start_is_what_never_asks_for(store):
    check_resume(None, config(), store, "never", "flow-1")


@pytest.mark.parametrize("flow_run_id", ["flow-2", None])
def test_never_refuses_a_run_that_exists(store, flow_run_id):
    with pytest.raises(ConfigError, match=r"resume=never, but a run exists at .*/run: choose another run_id"):
        check_resume(body_of(config()), config(), store, "never", flow_run_id)


def test_a_run_of_no_flow_is_nobodys_retry(store):
    with pytest.raises(ConfigError, match="resume=never"):
        check_resume(body_of(config(), flow_run_id=None), config(), store, "never", None)


def test_the_retry_of_the_same_flow_run_may_resume_with_never(store):
    check_resume(body_of(config(), "flow-1"), config(), store, "never", "flow-1")


@pytest.mark.parametrize("resume", ["must", "if-present"])
def test_the_same_configuration_resumes(store, resume):
    check_resume(body_of(config()), config(), store, resume, "flow-2")


def test_another_configuration_is_refused_and_every_difference_named(store):
    now = config("actor.adam.lr=0.5", "rollout.batch_size=4")

    with pytest.raises(ConfigError) as caught:
        check_resume(body_of(config()), now, store, "if-present", "flow-1")

    assert "actor.adam.lr: 1e-06 in the run, 0.5 now; rollout.batch_size: 128 in the run, 4 now" in str(caught.value)
    assert "choose another run_id" in str(caught.value)


@pytest.mark.parametrize(
    "override", ["run.stage_timeout=5", "logger.mlflow_experiment=other", "storage.timeout=5", "storage.root=elsewhere"]
)
def test_how_a_run_is_operated_may_change(store, override):
    check_resume(body_of(config()), config(override), store, "must", "flow-1")


@pytest.mark.agents
@pytest.mark.parametrize("override", ["agent.max_processes=8", "agent.step_timeout=90", "agent.server.host=0.0.0.0"])
def test_an_agent_may_get_more_time_and_fewer_processes(store, override):
    played = "train.agent_func_path=agent.py"

    check_resume(body_of(config(played)), config(played, override), store, "must", "flow-1")


@pytest.mark.agents
def test_a_run_of_before_agents_goes_on(store):
    """Its run.json knows neither the section ``agent`` nor the limits of images."""
    body = body_of(config())
    del body["config"]["agent"]
    for name in ("image_max_bytes", "image_max_pixels", "image_timeout"):
        del body["config"]["data"][name]

    check_resume(body, config(), store, "must", "flow-1")
    with pytest.raises(ConfigError, match=r"agent\.tools: \[\] in the run, \['python'\] now"):
        check_resume(body, config("agent.tools=python", "data.apply_chat_template=true"), store, "must", "flow-1")


@pytest.mark.parametrize(
    "override", ["train.colocate_all=true", "ref.offload=true", "train.colocate_actor_ref=true", "ds.enable_sleep=true"]
)
def test_who_shares_a_gpu_with_whom_may_change(store, override):
    with_reference, shared = "algo.kl.init_coef=0.1", "train.colocate_all=true"
    started = config(with_reference, *([shared] if override.startswith("ds.") else []))
    now = config(with_reference, override, *([shared] if override.startswith("ds.") else []))

    assert check_resume(body_of(started), now, store, "must", "flow-1") == {}


@pytest.mark.parametrize(
    "override",
    ["train.async_enable=true", "rollout.vllm_generate_batch_size=192", "algo.advantage.is_correction_enable=true"],
)
def test_which_policy_speaks_and_how_it_is_corrected_may_not(store, override):
    with pytest.raises(ConfigError, match=override.split("=")[0].replace(".", r"\.")):
        check_resume(body_of(config()), config(override), store, "must", "flow-1")


def test_a_run_of_before_pipelines_goes_on(store):
    """Its run.json says false where the correction now follows from the pipeline, and knows no bound of age."""
    body = body_of(config("algo.advantage.is_correction_enable=false"))
    del body["config"]["rollout"]["max_age"]
    del body["config"]["train"]["allow_uncorrected"]

    assert check_resume(body, config(), store, "must", "flow-1") == {}


def test_different_keys():
    old = {"a": 1, "b": {"c": 1, "run": 1}, "gone": 1, "run": {"x": 1}}
    new = {"a": 1, "b": {"c": 2, "run": 2}, "new": 2, "run": {"x": 2}}

    assert different_keys(old, new) == {"b.c": (1, 2), "b.run": (1, 2), "gone": (1, None), "new": (None, 2)}


def test_the_stored_configuration_is_the_one_the_run_was_started_with(store):
    checked = config("actor.adam.lr=0.5", "eval.dataset=h.jsonl")
    store.write_run(run_document(checked, "run", make_plan(checked, facts(3)), "flow-1"))

    assert stored_config(store) == checked


def test_a_run_that_does_not_exist_has_no_configuration(store):
    with pytest.raises(ConfigError, match=r"no run at .*/run: check the run_id and storage.root"):
        stored_config(store)
