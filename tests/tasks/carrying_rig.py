"""A run whose iterations overlap, in one process: see ``filling_rig``. Answers take time, and weights change meanwhile.

::

    rollout 0 ─▶ rollout 1 ─▶ rollout 2 …            one engine; each token carries the version that it speaks with then
         └▶ update 0 (v1) ─▶ update 1 (v2) ─▶ …      in the order of ``tasks.order``, as in the flows

An answer takes a tick for each of its ``pace(place)`` tokens, and goes on for as long as ``holds(place, iteration in which it
was begun, version that speaks)``. An update takes ``update_ticks``, and its version is on the engine at once, also in the midst
of answers.
"""

import asyncio

from filling_rig import Answers, Rig, Session, answered, place

from rlhf_core.agents.loading import Agent
from rlhf_core.errors import WorkerError
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore
from tasks.advantage import advantage
from tasks.due import checkpoint_due, is_last, iterations_to_do
from tasks.order import Step, StepOrder
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.update import update

TICK = 0.001


class Method:
    """``handle.method.remote(...)``."""

    def __init__(self, function):
        self.remote = function


class Engine:
    """What the rollout worker asks of an engine itself; the executor of the rig speaks in its place."""

    def __init__(self):
        self.speaks_with, self.dropped = 0, 0
        self.version, self.drop_requests = Method(self._version), Method(self._drop)

    async def _version(self):
        return self.speaks_with

    async def _drop(self):
        self.dropped += 1


class Slow(Answers):
    """Answers token by token."""

    def __init__(self, script, pace, holds):
        super().__init__(script)
        self._pace, self._holds = pace, holds
        self.engine = Engine()
        self.begun, self.ended_early = [], []  # (epoch, place) of each episode
        self.spoken = 0  # tokens of answers that came to their end

    async def execute(self, episode):
        where = place(episode.group_id)
        self.begun.append(where)
        try:
            return [await self._answer(episode, where)]
        except asyncio.CancelledError:
            self.ended_early.append(where)
            raise

    async def _answer(self, episode, where):
        value, versions = self._script(where)[episode.sample_index], []
        while len(versions) < self._pace(where) or self._holds(where, episode.iteration, self.engine.speaks_with):
            await asyncio.sleep(TICK)
            versions.append(self.engine.speaks_with)
        if value is None:
            raise WorkerError("the engine died")
        if value == "broken":
            raise ValueError("the environment is broken")
        self.sampled.append(where)
        self.spoken += len(versions)
        return answered(episode, versions)


class OverlappingSession(Session):
    """Its engine gets newer weights when a version is published, or when a rollout needs them."""

    pace = staticmethod(lambda where: 1)
    holds = staticmethod(lambda where, iteration, version: False)
    update_ticks = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.player = Slow(arguments[3], self.pace, self.holds)
        self._rollout._agent = Agent(self.player, "a script")
        self._engines = [self.player.engine]

    async def with_engines(self, oldest, newest, work):
        engine = self.player.engine
        assert oldest <= newest
        if not oldest <= engine.speaks_with <= newest:
            engine.speaks_with = newest
        return await work()

    async def update(self, iteration, experience, kl_coef):
        await asyncio.sleep(self.update_ticks * TICK)
        return await super().update(iteration, experience, kl_coef)

    def kill(self):
        """What the process plays is gone with it."""
        for group in self._rollout._in_play._open.values() if self._rollout._in_play else ():
            group.task.cancel()


class OverlappingRig(Rig):
    """A run of overlapping iterations that can be killed and started again.

    Args:
        monkeypatch: pytest's.
        prompts: in an epoch.
        script: of the rewards.
        overrides: of the configuration.
        pace: place to the tokens of an answer, at least.
        holds: whether an answer goes on, see above.
        update_ticks: that an update takes.
    """

    def __init__(self, monkeypatch, prompts, script, *overrides, update_ticks=0, **answers):
        super().__init__(monkeypatch, prompts, script, *overrides)
        told = {name: staticmethod(function) for name, function in answers.items()}
        self.session_kind = type("Told", (OverlappingSession,), {"update_ticks": update_ticks, **told})

    async def train(self, run):
        """What the flows do, until the run ends or is killed. Returns the iterations that were begun."""
        order, begun, todo = StepOrder(self.config), [], iterations_to_do(run)
        newest = self.store.newest_update()
        run.session.player.engine.speaks_with = 0 if newest is None else newest[0] + 1
        try:
            async with asyncio.TaskGroup() as group:
                for iteration in todo:
                    order.begin(iteration)
                    await order.may_begin(iteration)
                    if iteration != todo[0] and is_last(run, iteration):
                        break
                    begun.append(iteration)
                    group.create_task(self._iteration(run, order, iteration))
        except BaseExceptionGroup as error:
            run.session.kill()
            raise error.exceptions[0] from None
        run.session.kill()
        return begun

    async def _iteration(self, run, order, iteration):
        for step, task in (
            (Step.ROLLOUT, rollout),
            (Step.REWARD, reward),
            (Step.ADVANTAGE, advantage),
            (Step.UPDATE, update),
        ):
            async with order.step(step, iteration):
                await task.fn(self.run_id, iteration)
        async with order.step(Step.PUBLISH, iteration):
            run.session.player.engine.speaks_with = iteration + 1
        async with order.step(Step.SAVE, iteration):
            if checkpoint_due(run, iteration + 1):
                CheckpointStore(self.store).commit(iteration + 1, {"digest": f"digest-{iteration}"}, [])

    def ages(self, iteration):
        """Of every token that an iteration trained, in versions; by the shards."""
        parts = self.store.stage(iteration, Stage.ROLLOUT)[0].parts
        batch = set(self.trained(iteration))
        rows = [row for row in self.store.read_trajectories(parts) if place(row.group_id) in batch]
        return [iteration - span.version for row in rows for span in row.version_spans]
