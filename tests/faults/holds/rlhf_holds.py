"""Lets a test stop a run at an exact point of a stage, without a line for it in the product.

::

    test                                   worker that comes to the point
    $RLHF_HOLDS/update-3      ──arm──▶     renames it (one of many ranks succeeds), writes its pid into
                              ◀──────      $RLHF_HOLDS/update-3.reached, and waits
    SIGKILL of whomever
    deletes update-3.reached  ──────▶      goes on

Points, each used once, by iteration or version:

    rollout-I  evaluate-V     an engine in the middle of a batch
    reward-I   judge-V        a reward process, inside the user's function
    advantage-I               a rank that is to compute log-probs
    update-I   updated-I      a rank before its update; after it, before it is recorded
    sync-V                    an engine that is to take weights
    checkpoint-V              the files are written, the manifest is not
"""

import asyncio
import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

HOLD_SECONDS = 300.0  # then it goes on by itself: a test that died must not leave a run behind for ever
POLL_SECONDS = 0.02


def install():
    """Wrap the workers' methods as their modules are imported."""
    if "RLHF_HOLDS" in os.environ:
        sys.meta_path.insert(0, _Finder())


def hold(point):
    """Wait here, if the point is armed."""
    reached = _take(point)
    deadline = time.monotonic() + HOLD_SECONDS
    while reached is not None and reached.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


async def hold_async(point):
    """The same on an event loop, which goes on meanwhile."""
    reached = _take(point)
    deadline = time.monotonic() + HOLD_SECONDS
    while reached is not None and reached.exists() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)


def pass_on(point, to):
    """If the point is armed, arm another one in its place: of a process that does not know the iteration."""
    with contextlib.suppress(FileNotFoundError):
        (_folder() / point).rename(_folder() / to)


def _folder():
    return Path(os.environ["RLHF_HOLDS"])


def _take(point):
    """The file to wait for; None if the point is not armed, or another process has come first."""
    armed, taken = _folder() / point, _folder() / f"{point}.taken"
    try:
        armed.rename(taken)
    except FileNotFoundError:
        return None
    taken.write_text(str(os.getpid()))
    return taken.rename(_folder() / f"{point}.reached")


# --- the points ---------------------------------------------------------------------------------------------------------


def _rollout_worker(module):
    worker = module.RolloutWorker

    def before_rollout(self, draw, *rest):
        pass_on(f"rollout-{draw.iteration}", "generating")

    def before_evaluate(self, version, *rest):
        pass_on(f"evaluate-{version}", "generating")
        pass_on(f"judge-{version}", "judge")

    _before(worker, "rollout", before_rollout)
    _before(worker, "evaluate", before_evaluate)


def _scoring_worker(module):
    worker = module.ScoringWorker
    _before(worker, "score", lambda self, iteration, *rest: pass_on(f"reward-{iteration}", "scoring"))
    _before(worker, "judge", lambda self, *rest: pass_on("judge", "scoring"))


def _engine_worker(module):
    worker = module.EngineWorker
    generate, take_weights = worker.generate_stream, worker.update_weights

    @functools.wraps(generate)
    async def generate_stream(self, requests):
        async for chunk in generate(self, requests):
            yield chunk
            if (_folder() / "generating").exists():
                core = self._engine._llm.engine_core
                await core.pause_scheduler_async("keep", False)  # so that requests are in flight as long as it takes
                await hold_async("generating")
                with contextlib.suppress(Exception):  # the engine may be dead by now
                    await asyncio.wait_for(core.resume_scheduler_async(), 5)

    @functools.wraps(take_weights)
    async def update_weights(self, update):
        await hold_async(f"sync-{update.version}")
        return await take_weights(self, update)

    worker.generate_stream, worker.update_weights = generate_stream, update_weights


def _policy_worker(module):
    worker = module.PolicyWorker
    logprobs, update = worker.logprobs, worker.update

    @functools.wraps(logprobs)
    def held_logprobs(self, rollout, reward):
        hold(f"advantage-{rollout.iteration}")
        return logprobs(self, rollout, reward)

    @functools.wraps(update)
    def held_update(self, iteration, experience, kl_coef):
        hold(f"update-{iteration}")
        metrics = update(self, iteration, experience, kl_coef)
        hold(f"updated-{iteration}")
        return metrics

    worker.logprobs, worker.update = held_logprobs, held_update


def _rank_worker(module):
    worker = module.TrainedWorker
    save = worker.save

    @functools.wraps(save)
    def held_save(self, version):
        files = save(self, version)
        hold(f"checkpoint-{version}")
        return files

    worker.save = held_save


POINTS = {
    "rlhf_core.cluster.rollout_worker": _rollout_worker,
    "rlhf_core.cluster.scoring_worker": _scoring_worker,
    "rlhf_core.cluster.engine_worker": _engine_worker,
    "rlhf_core.cluster.policy_worker": _policy_worker,
    "rlhf_core.cluster.rank_worker": _rank_worker,
}


def _before(worker, name, act):
    method = getattr(worker, name)

    @functools.wraps(method)
    async def wrapped(self, *arguments):
        act(self, *arguments)
        return await method(self, *arguments)

    setattr(worker, name, wrapped)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and wraps it."""

    def find_spec(self, name, path=None, target=None):
        if name not in POINTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                POINTS[name](module)

            spec.loader.exec_module = exec_module
        return spec
