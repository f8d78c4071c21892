"""The plan of a supervised run, and what its log says is left. No processes."""

import pytest
from task_samples import Notebook

from rlhf_core.cluster.supervised_worker import ExampleFacts, _cursor
from rlhf_core.config import parse_supervised_config
from rlhf_core.records import PromptCursor, Stage, StageManifest
from rlhf_core.storage import CheckpointStore, RunStore
from tasks.due import checkpoint_due, evaluation_due, iterations_to_do
from tasks.resume import check_resume
from tasks.supervised_run import OpenSupervisedRun, make_supervised_plan, steps_of


def config(*overrides):
    base = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "rows.jsonl"}}
    return parse_supervised_config(base, ["train.batch_size=4", "train.steps_per_iteration=2", *overrides])


def facts(examples):
    return ExampleFacts(examples=examples, dropped=1, held_out=2, fingerprint="f")


def run(tmp_path, *overrides, examples=20):
    settings = config(*overrides)
    plan = make_supervised_plan(settings, facts(examples))
    store = RunStore("run", str(tmp_path))
    return OpenSupervisedRun("run", "sft", settings, store, None, plan, Notebook())


def train(run, *iterations):
    for k in iterations:
        run.store.commit(StageManifest("run", k, Stage.UPDATE, (), 0, 0, k, body={"version": k + 1}))


@pytest.mark.parametrize(
    ("examples", "overrides", "steps", "iterations"),
    [
        (20, [], 5, 3),
        (21, [], 6, 3),  # the last step of an epoch is short
        (3, [], 1, 1),
        (20, ["train.max_epochs=3"], 15, 8),
        (20, ["train.max_epochs=3", "train.max_steps=7"], 7, 4),
        (20, ["train.max_steps=100"], 5, 3),
    ],
)
def test_steps_and_iterations(examples, overrides, steps, iterations):
    plan = make_supervised_plan(config(*overrides), facts(examples))

    assert (plan.total_steps, plan.iterations) == (steps, iterations)


def test_iterations_are_all_steps_once(tmp_path):
    opened = run(tmp_path)

    assert [steps_of(opened, k) for k in range(3)] == [(0, 2), (2, 2), (4, 1)]


def test_steps_do_not_cross_epochs():
    cursors = [_cursor(10, 4, step) for step in range(7)]

    assert cursors == [
        PromptCursor(epoch, offset) for epoch, offset in [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0)]
    ]


def test_what_is_left_is_what_the_log_lacks(tmp_path):
    opened = run(tmp_path)
    assert iterations_to_do(opened) == [0, 1, 2]

    train(opened, 0, 1)
    assert iterations_to_do(opened) == [2]

    train(opened, 2)
    assert iterations_to_do(opened) == [2]  # its checkpoint is missing

    CheckpointStore(opened.store).commit(3, {"digest": "d"}, [])
    assert iterations_to_do(opened) == []


def test_the_first_and_the_last_version_are_evaluated_and_those_in_between_when_asked(tmp_path):
    seldom = run(tmp_path, "eval.dataset=held_out.jsonl", "train.max_epochs=2")
    often = run(tmp_path, "eval.dataset=held_out.jsonl", "eval.steps=2", "train.max_epochs=2")
    never = run(tmp_path)

    assert [v for v in range(6) if evaluation_due(seldom, v)] == [0, 5]
    assert [v for v in range(6) if evaluation_due(often, v)] == [0, 2, 4, 5]
    assert not any(evaluation_due(never, v) for v in range(6))


def test_the_last_version_is_saved_and_others_when_asked(tmp_path):
    assert [v for v in range(1, 4) if checkpoint_due(run(tmp_path), v)] == [3]
    assert [v for v in range(1, 4) if checkpoint_due(run(tmp_path, "ckpt.save_steps=2"), v)] == [2, 3]


def test_a_resumed_run_keeps_its_configuration(tmp_path):
    body = {"kind": "sft", "config": config().model_dump(mode="json")}
    store = RunStore("run", str(tmp_path))

    check_resume(body, config("run.start_timeout=5"), store, "must", None, "sft")
    with pytest.raises(Exception, match=r"train.seed: 42 in the run, 7 now"):
        check_resume(body, config("train.seed=7"), store, "must", None, "sft")
