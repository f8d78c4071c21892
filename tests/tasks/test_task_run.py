"""What the configuration, the log and the data say must fit together before anything is done."""

import pytest
from task_samples import complete, config, facts, open_run

from rlhf_core.errors import ConfigError
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore
from tasks.run import (
    check_resume,
    checkpoint_due,
    default_run_id,
    different_keys,
    evaluation_due,
    iterations_to_do,
    make_plan,
    resolve_config,
    run_document,
    stored_config,
)


@pytest.fixture
def store(tmp_path):
    return RunStore("run", str(tmp_path))


def body_of(checked, flow_run_id="flow-1"):
    return {"config": checked.model_dump(mode="json"), "flow_run_id": flow_run_id}


# --- may this start resume what is there?


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


def test_different_keys():
    old = {"a": 1, "b": {"c": 1, "run": 1}, "gone": 1, "run": {"x": 1}}
    new = {"a": 1, "b": {"c": 2, "run": 2}, "new": 2, "run": {"x": 2}}

    assert different_keys(old, new) == {"b.c": (1, 2), "b.run": (1, 2), "gone": (1, None), "new": (None, 2)}


# --- the plan


@pytest.mark.parametrize(
    ("prompts", "overrides", "iterations", "steps"),
    [
        (3, [], 1, 1),  # CASE 24: data smaller than a batch
        (8, [], 1, 1),
        (9, [], 2, 2),
        (16, ["train.num_episodes=3"], 6, 6),
        (17, ["train.num_episodes=2"], 6, 6),  # 8, 8, 1 twice: a batch does not cross epochs
        (16, ["train.max_iterations=1"], 1, 1),
        (16, ["train.max_iterations=99"], 2, 2),
        (16, ["train.max_epochs=3"], 2, 6),
        (16, ["train.batch_size=8"], 2, 8),
        (17, ["train.batch_size=8"], 3, 9),  # 4 + 4 + 1: the tail of 4 samples is one step
        (19, ["train.batch_size=8"], 3, 10),  # 4 + 4 + 2
        (19, ["train.batch_size=8", "train.max_iterations=2"], 2, 8),
    ],
)
def test_the_plan(prompts, overrides, iterations, steps):
    """Batches of 8 prompts with 4 samples each."""
    checked = config("rollout.batch_size=8", "rollout.n_samples_per_prompt=4", *overrides)

    plan = make_plan(checked, facts(prompts))

    assert (plan.iterations, plan.total_steps, plan.critic_steps) == (iterations, steps, 0)


GAE = "algo.advantage.estimator=gae"


@pytest.mark.parametrize(
    ("overrides", "steps", "critic_steps"),
    [
        ([GAE], 9, 9),  # 4 + 4 + 1
        ([GAE, "critic.freezing_steps=1"], 5, 9),
        ([GAE, "critic.freezing_steps=2", "train.max_epochs=3"], 3, 27),
        (["critic.freezing_steps=2"], 9, 0),  # there is no critic
    ],
)
def test_the_plan_of_a_critic(overrides, steps, critic_steps):
    """17 prompts in batches of 8, with 4 samples each, 8 samples a step: the policy's schedule begins when it does."""
    checked = config("rollout.batch_size=8", "rollout.n_samples_per_prompt=4", "train.batch_size=8", *overrides)

    plan = make_plan(checked, facts(17))

    assert (plan.total_steps, plan.critic_steps) == (steps, critic_steps)


def test_a_plan_in_which_only_the_critic_learns_is_refused():
    checked = config("rollout.batch_size=8", GAE, "critic.freezing_steps=3")

    assert make_plan(checked, facts(25)).iterations == 4
    with pytest.raises(
        ConfigError, match=r"critic\.freezing_steps=3 leaves none of the run's 3 iterations .*: lower it"
    ):
        make_plan(checked, facts(24))


def test_the_plan_remembers_the_prompts():
    plan = make_plan(config(), facts(5, dropped=2, fingerprint="abc"))

    assert (plan.prompts, plan.dropped, plan.fingerprint) == (5, 2, "abc")


# --- what is left to do


def test_nothing_is_done(tmp_path):
    assert iterations_to_do(open_run(tmp_path)) == [0, 1, 2, 3]


def test_an_iteration_without_an_update_is_not_done(tmp_path):
    run = open_run(tmp_path)
    complete(run, 0)
    complete(run, 1, stages=(Stage.ROLLOUT, Stage.REWARD, Stage.EXPERIENCE))

    assert iterations_to_do(run) == [1, 2, 3]


@pytest.mark.parametrize(("saved", "left"), [(False, [1, 2, 3]), (True, [2, 3])])
def test_an_iteration_whose_checkpoint_is_due_and_missing_is_not_done(tmp_path, saved, left):
    run = open_run(tmp_path, "ckpt.save_steps=2")
    complete(run, 0)
    complete(run, 1, checkpoint=saved)

    assert iterations_to_do(run) == left


@pytest.mark.parametrize(("score", "left"), [(None, [1, 2, 3]), (0.5, [2, 3])])
def test_an_iteration_whose_evaluation_is_due_and_missing_is_not_done(tmp_path, score, left):
    run = open_run(tmp_path, "eval.dataset=h.jsonl", "eval.steps=2")
    complete(run, 0)
    complete(run, 1, evaluation=score)

    assert iterations_to_do(run) == left


@pytest.mark.parametrize(("saved", "left"), [(False, [1]), (True, [])])
def test_the_last_checkpoint_is_always_due(tmp_path, saved, left):
    run = open_run(tmp_path, iterations=2)
    complete(run, 0)
    complete(run, 1, checkpoint=saved)

    assert iterations_to_do(run) == left


def test_a_run_stopped_at_the_end_of_an_epoch_goes_on(tmp_path):
    """CASE 5: 8 prompts, batch 4, 2 epochs; stopped after step 2: exactly steps 3 and 4 are left."""
    plan = make_plan(config("rollout.batch_size=4", "train.num_episodes=2"), facts(8))
    run = open_run(tmp_path, iterations=plan.iterations)
    complete(run, 0)
    complete(run, 1)

    assert iterations_to_do(run) == [2, 3]


def due(question, run, first=0):
    return [version for version in range(first, run.plan.iterations + 1) if question(run, version)]


@pytest.mark.parametrize(("steps", "versions"), [(-1, [4]), (1, [1, 2, 3, 4]), (3, [3, 4]), (9, [4])])
def test_when_a_checkpoint_is_due(tmp_path, steps, versions):
    run = open_run(tmp_path, f"ckpt.save_steps={steps}")

    assert due(checkpoint_due, run, first=1) == versions


@pytest.mark.parametrize(("steps", "versions"), [(-1, [0, 4]), (1, [0, 1, 2, 3, 4]), (3, [0, 3, 4])])
def test_when_an_evaluation_is_due(tmp_path, steps, versions):
    assert due(evaluation_due, open_run(tmp_path, "eval.dataset=h.jsonl", f"eval.steps={steps}")) == versions


def test_without_held_out_prompts_no_evaluation_is_due(tmp_path):
    assert due(evaluation_due, open_run(tmp_path)) == []


# --- names and documents


def test_the_default_run_id_is_the_same_on_a_retry():
    first, again = (default_run_id("lively-otter", "0a1b2c3d-4e5f") for _ in range(2))

    assert first == again == "lively-otter-0a1b2c3d"


def test_the_default_run_id_names_a_folder_whatever_the_flow_run_is_called(tmp_path):
    run_id = default_run_id("Größe: 7 / lr 1e-6" * 20, "0a1b2c3d-4e5f")

    assert RunStore(run_id, str(tmp_path)).run_id == run_id
    assert run_id.endswith("-0a1b2c3d")


def test_the_stored_configuration_is_the_one_the_run_was_started_with(store):
    checked = config("actor.adam.lr=0.5", "eval.dataset=h.jsonl")
    store.write_run(run_document(checked, "run", make_plan(checked, facts(3)), "flow-1"))

    assert stored_config(store) == checked


def test_a_run_that_does_not_exist_has_no_configuration(store):
    with pytest.raises(ConfigError, match=r"no run at .*/run: check the run_id and storage.root"):
        stored_config(store)


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
