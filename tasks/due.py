"""What is due of an open run, by its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config import SupervisedConfig
from rlhf_core.records import Stage
from tasks.best import is_best, is_saved
from tasks.worlds import begins_a_world

if TYPE_CHECKING:
    from tasks.run import AnyRun


def iterations_to_do(run: AnyRun) -> list[int]:
    """What is left, by the log: an iteration is done when its update, and what was due after it, are recorded."""
    newest = run.store.newest_update()
    if newest is None:
        return list(range(run.plan.iterations))
    iteration = newest[0]
    version = iteration + 1
    evaluated = not evaluation_due(run, version) or run.store.read_evaluation(version) is not None
    saved = not checkpoint_due(run, version) or is_saved(run, version)
    end = version if is_last(run, version) else run.plan.iterations
    return list(range(iteration if not (evaluated and saved) else version, end))


def newest_version(run: AnyRun) -> int:
    """The version that the run's model has come to."""
    newest = run.store.newest_update()
    return 0 if newest is None else newest[0] + 1


def is_last(run: AnyRun, version: int) -> bool:
    """True if the run ends with this version: the plan does, or its last prompt went into the iteration that made it.

    Filtering trains fewer prompts than it draws, so that the data may end before the plan; a replay draws none.
    """
    if version == run.plan.iterations:
        return True
    if version == 0 or isinstance(run.config, SupervisedConfig):
        return False
    if run.config.is_replay or not run.config.fills_batches:
        return False
    found = run.store.stage(version - 1, Stage.ROLLOUT)
    if found is None:
        return False
    body = found[0].body
    at_hand = body["buffered"] or body.get("unfinished")
    return bool(body["cursor_out"]["epoch"] >= run.config.train.num_episodes and not at_hand)


def checkpoint_due(run: AnyRun, version: int) -> bool:
    """True if this version is to be saved: every ``ckpt.save_steps``, the last, and the best. Ask after its evaluation.

    So is the one from which the run went on with other processes: see ``worlds``.
    """
    every = run.config.ckpt.save_steps
    due = is_last(run, version) or (every > 0 and version % every == 0) or is_best(run, version)
    return due or begins_a_world(run.store, version)


def evaluation_due(run: AnyRun, version: int) -> bool:
    """True if this version is to be evaluated: the first, the last, and every ``eval.steps``."""
    evaluation = run.config.eval
    if not evaluation.dataset:
        return False
    return version == 0 or is_last(run, version) or (evaluation.steps > 0 and version % evaluation.steps == 0)
