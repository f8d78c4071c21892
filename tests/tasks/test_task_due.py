"""What is left to do, by the log."""

import pytest
from minimal_config import config
from task_samples import complete, facts, open_run

from rlhf_core.records import Stage
from tasks.due import checkpoint_due, evaluation_due, iterations_to_do
from tasks.plan import make_plan


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
