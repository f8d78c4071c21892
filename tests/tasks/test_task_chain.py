"""What came of the stages of a chain, by their logs."""

import pytest
from minimal_config import MINIMAL

from rlhf_core.cluster.placement import Node
from rlhf_core.config import ChainedRun, parse_config, parse_supervised_config
from rlhf_core.records import Stage, StageManifest
from tasks.chain import Headline, StageResult, _check_start, chain_markdown, is_finished, stage_result, store_of

SUPERVISED = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "rows.jsonl"}}


def run_of(folder, flow):
    root = [f"storage.root={folder}"]
    config = parse_config(MINIMAL, root) if flow == "train" else parse_supervised_config(SUPERVISED, root)
    return ChainedRun("stage", flow, "demo-stage", config)


def log(run, *iterations, first_eval=None, last_eval=None):
    """Record iterations with these metrics, and evaluations of the first and the last version."""
    store = store_of(run)
    for k, metrics in enumerate(iterations):
        body = {"seconds": 1.0, "optimizer_steps": 4 * (k + 1), "metrics": metrics}
        store.commit(StageManifest(run.run_id, k, Stage.UPDATE, (), 0, 0, k, body=body))
    for version, metrics in ((0, first_eval), (len(iterations), last_eval)):
        if metrics:
            store.write_evaluation(version, {"version": version, "metrics": metrics})
    return stage_result(run)


def test_iterations_and_steps_are_those_of_the_newest_update(tmp_path):
    result = log(run_of(tmp_path, "sft"), {"train/loss": 3.0}, {"train/loss": 2.0}, {"train/loss": 1.0})

    assert (result.version, result.optimizer_steps) == (3, 12)
    assert result.headlines == (Headline("train/loss", 3.0, 1.0),)


@pytest.mark.parametrize(("flow", "metric"), [("sft", "loss"), ("reward-model", "accuracy"), ("dpo", "accuracy")])
def test_held_out_examples_tell_more_than_those_that_were_trained(tmp_path, flow, metric):
    trained = {"train/loss": 3.0, "train/accuracy": 0.9}
    before, after = {f"eval/{metric}": 0.5}, {f"eval/{metric}": 0.75}

    result = log(run_of(tmp_path, flow), trained, trained, first_eval=before, last_eval=after)

    assert result.headlines == (Headline(f"eval/{metric}", 0.5, 0.75),)


def test_a_run_by_rewards_shows_the_reward_its_parts_and_what_was_held_out(tmp_path):
    """One part of weight 1 is the reward, and is not shown twice; extra logs of a part are not shown."""
    first = {
        "reward/mean": -2.0,
        "reward_log/model": -2.0,
        "reward_log/digits": 0.5,
        "reward_log/a/b": 1.0,
        "reward/std": 1.0,
    }
    last = {
        "reward/mean": 6.0,
        "reward_log/model": 6.0,
        "reward_log/digits": 0.875,
        "reward_log/a/b": 2.0,
        "reward/std": 1.0,
    }
    evals = {"first_eval": {"eval/reward_mean": -3.0}, "last_eval": {"eval/reward_mean": 7.0}}

    result = log(run_of(tmp_path, "train"), first, last, **evals)

    assert result.headlines == (
        Headline("reward/mean", -2.0, 6.0),
        Headline("reward_log/digits", 0.5, 0.875),
        Headline("eval/reward_mean", -3.0, 7.0),
    )


def test_a_stage_whose_agent_rewards_itself_needs_no_reward_function(tmp_path):
    overrides = ["train.agent_func_path=agent.py", f"storage.root={tmp_path}"]
    config = parse_config({key: value for key, value in MINIMAL.items() if key != "reward"}, overrides)

    _check_start(ChainedRun("stage", "train", "demo-stage", config), (), [Node("here", 64, 0)])

    assert not config.has_reward_source


def test_a_stage_that_trained_nothing_has_nothing_to_show(tmp_path):
    result = log(run_of(tmp_path, "train"))

    assert (result.version, result.optimizer_steps, result.headlines) == (0, 0, ())


def test_a_stage_is_finished_once_its_run_says_so(tmp_path):
    run = run_of(tmp_path, "sft")
    log(run, {"train/loss": 1.0})
    before = is_finished(run)
    store_of(run).write_end(1)

    assert (before, is_finished(run)) == (False, True)


def test_the_table_and_the_tree():
    headlines = (Headline("reward/mean", -2.25, 6.78901), Headline("reward_log/digits", 0.5, 0.875))
    stages = [
        StageResult("sft", "sft", "demo-sft", "file:///runs/demo-sft", 4, 48, ()),
        StageResult("ppo", "train", "demo-ppo", "file:///runs/demo-ppo", 15, 14, headlines),
    ]

    assert chain_markdown("demo", stages, ["demo-ppo", "└─ policy"]).splitlines() == [
        "# Chain demo",
        "",
        "| stage | run | iterations | steps | metric | first | last |",
        "|---|---|---:|---:|---|---:|---:|",
        "| sft | demo-sft | 4 | 48 |  |  |  |",
        "| ppo | demo-ppo | 15 | 14 | reward/mean | -2.25 | 6.789 |",
        "|  |  |  |  | reward_log/digits | 0.5 | 0.875 |",
        "",
        "Where the last model comes from:",
        "",
        "```",
        "demo-ppo",
        "└─ policy",
        "```",
    ]
