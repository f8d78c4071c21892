"""What a replay may change of the run whose trajectories it trains on."""

import pytest

from rlhf_core.config import parse_config
from rlhf_core.config.replay import check_replay, exact_name, replay_config, source_config
from rlhf_core.errors import ConfigError

URL = "file:///runs/first"
MINIMAL = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
}


def body(*overrides, **more):
    return {"config": parse_config(MINIMAL, overrides).model_dump(mode="json"), **more}


def derived(recorded, *changes, iterations=None):
    return replay_config(recorded, URL, {"root": "file:///runs"}, changes, iterations)


def filters_anew(recorded, *changes):
    return check_replay(source_config(recorded, URL), derived(recorded, *changes))


def test_a_replay_has_the_sources_configuration_but_for_what_is_changed_and_what_needs_an_engine():
    recorded = body(
        "rollout.temperature=0.7", "eval.dataset=held.jsonl", "ckpt.best_metric_key=eval/score_mean", cpu_threads=3
    )

    config = derived(recorded, "algo.advantage.estimator=rloo", iterations=(2, 5))

    assert config.algo.advantage.estimator == "rloo"
    assert config.algo.advantage.is_correction_enable
    assert (config.rollout.temperature, config.run.cpu_threads) == (0.7, 3)
    assert (config.eval.dataset, config.ckpt.best_metric_key) == ((), None)
    assert config.replay.model_dump() == {"source": URL, "iterations": (2, 5), "rewards": "source"}
    assert config.storage.root == "file:///runs"


def test_the_correction_can_be_turned_off():
    assert not derived(body(), "algo.advantage.is_correction_enable=false").algo.advantage.is_correction_enable


PARTIAL = (
    "train.async_enable=true",
    "train.async_queue_size=2",
    "train.partial_rollout_enable=true",
    "train.partial_rollout_mask_old=true",
    "rollout.vllm_generate_batch_size=192",
)
UNCORRECTED = (
    "train.async_enable=true",
    "algo.advantage.is_correction_enable=false",
    "train.allow_uncorrected=true",
)


@pytest.mark.parametrize("source", [PARTIAL, UNCORRECTED])
def test_a_run_whose_iterations_overlapped_is_replayed_one_after_the_other(source):
    recorded = body(*source)

    config = derived(recorded, "algo.advantage.estimator=rloo")

    assert (config.overlaps, config.carries_unfinished, config.max_age) == (False, False, None)
    assert config.train.partial_rollout_mask_old == (source is PARTIAL)
    assert config.corrects_mismatch
    assert not check_replay(source_config(recorded, URL), config)


@pytest.mark.parametrize(
    ("change", "rewards"),
    [
        ("reward.functions=[{use: length}]", "anew"),
        ("reward.normalize_enable=true", "anew"),
        ("reward.clip_range=[-1, 1]", "source"),
        ("reward.timeout=5", "source"),
    ],
)
def test_answers_are_scored_again_where_what_scores_them_changes(change, rewards):
    config = derived(body(), change)

    assert config.replay.rewards == rewards
    assert config.scores == (rewards == "anew")


@pytest.mark.parametrize(
    "change",
    [
        "rollout.n_samples_per_prompt=4",
        "rollout.temperature=0.5",
        "data.max_len=99",
        "vllm.num_engines=2",
        "train.num_episodes=2",
        "agent.max_turns=3",
        "train.async_enable=true",
    ],
)
def test_what_was_sampled_belongs_to_the_source(change):
    recorded = body("rollout.max_new_tokens=16", "train.agent_func_path=agent.py")

    with pytest.raises(ConfigError, match=rf"{change.split('=')[0]}: .* decided what was sampled"):
        filters_anew(recorded, change)


@pytest.mark.parametrize(
    "change",
    [
        "rollout.micro_batch_size=2",
        "train.max_epochs=2",
        "actor.adam.lr=1e-3",
        "train.seed=5",
        "train.colocate_all=true",
    ],
)
def test_how_it_is_trained_does_not(change):
    assert not filters_anew(body(), change)


def test_rewards_that_are_kept_must_be_those_of_the_configuration():
    recorded = body()

    with pytest.raises(ConfigError, match=r"reward\.functions differ .* set replay\.rewards=anew"):
        filters_anew(recorded, "reward.functions=[{use: length}]", "replay.rewards=source")


FILTERED = "algo.dynamic_filtering_enable=true"


@pytest.mark.parametrize(
    ("source", "changes", "anew"),
    [
        ([], ["algo.advantage.estimator=rloo"], False),
        ([], [FILTERED], True),
        ([FILTERED], ["algo.advantage.estimator=rloo"], False),
        ([FILTERED], ["algo.dynamic_filtering_enable=false"], True),
        ([FILTERED], ["algo.dynamic_filtering_range=[0.2, 0.8]"], True),
        ([FILTERED], ["replay.rewards=anew"], True),
        ([], ["replay.rewards=anew"], False),
        ([], ["algo.dynamic_filtering_range=[0.2, 0.8]"], False),
    ],
)
def test_groups_are_filtered_anew_where_the_verdicts_may_differ(source, changes, anew):
    assert filters_anew(body(*source), *changes) is anew


def test_models_of_other_runs_are_named_by_the_checkpoint_that_the_source_used():
    model = {
        "spec": "run:sft@best",
        "run": "sft",
        "version": 7,
        "digest": "d",
        "url": "s3://b/runs/sft/checkpoints/v00000007",
    }
    recorded = body("actor.model_name_or_path=run:sft@best", models={"policy": model, "reference": model})

    config = derived(recorded, "algo.advantage.estimator=rloo")

    assert exact_name(model) == "run:s3://b/runs/sft@7"
    assert config.actor.model_name_or_path == "run:s3://b/runs/sft@7"
    assert config.ref.model_name_or_path is None
    assert not check_replay(source_config(recorded, URL), config)
