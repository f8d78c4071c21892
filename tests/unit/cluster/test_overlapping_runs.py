"""Overlapping iterations at random: flows, tasks, order, locks, healing and log are real; actors answer late, and die.

::

    seed ─▶ pipeline, sizes ─▶ run ─▶ actors killed, broken off, resumed … ─▶ at its end; and never did an engine speak
                                                                              with a version that it may not speak with
"""

import asyncio
import contextlib
import random
from types import SimpleNamespace

import pytest
import scripted_actors
from minimal_config import config
from scripted_actors import Actor, Groups, Light, Rank, digest
from session_rig import EVERYBODY, Held

from flows import iteration, train
from rlhf_core.cluster.measures import RolloutTally
from rlhf_core.cluster.rollout_worker import RolloutOutcome
from rlhf_core.cluster.scoring_worker import Assembled, Scored
from rlhf_core.cluster.session import PlannedSteps, RunSession
from rlhf_core.errors import WeightSyncError, WorkerError
from rlhf_core.records import PromptCursor, Stage
from rlhf_core.storage import CheckpointStore, RunStore
from tasks import run as open_runs
from tasks.plan import RunPlan
from tasks.run import OpenRun

TASKS = ("rollout", "reward", "advantage", "update", "sync_weights", "evaluate", "checkpoint")
ONE_CALL_AT_A_TIME = ("policy", "critic", "reference", "reward")
SECONDS = 60  # for a run that takes less than one: it hangs


class Chance(random.Random):
    """What happens when."""

    async def pause(self, most=4):
        for _ in range(self.randint(0, most)):
            await asyncio.sleep(0)
        if self.random() < 0.2:
            await asyncio.sleep(self.random() * 0.002)


@pytest.fixture
def faults(monkeypatch):
    """What came of a wrong order: a version that may not speak, weights that change too early. Actors take their time."""
    found = []
    answers = Actor.__getattr__

    def late(actor, name):
        inner = answers(actor, name).remote

        async def there(*arguments, **named):
            await actor.groups.chance.pause()
            one_by_one = actor.role in ONE_CALL_AT_A_TIME
            async with actor.__dict__.setdefault("turn", asyncio.Lock()) if one_by_one else contextlib.nullcontext():
                answer = await inner(*arguments, **named)
            if actor.dead:
                raise scripted_actors.RayActorError()
            return answer

        def call(*arguments, **named):
            task = asyncio.ensure_future(there(*arguments, **named))  # goes on though its caller gives up
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return asyncio.shield(task)

        return scripted_actors.Method(call)

    async def speak(worker, engines, oldest, newest, may_change=False):
        began = [engine.held for engine in engines]
        for _ in range(worker.groups.chance.randint(2, 12)):
            await worker.groups.chance.pause()
            if worker.dead:
                return
            if any(engine.dead for engine in engines):
                raise WorkerError("an engine died")
            held = [engine.held for engine in engines]
            if not all(oldest <= version <= newest for version in held) or (held != began and not may_change):
                found.append(f"{began}, then {held} spoke for {oldest} to {newest}")

    async def rollout(worker, draw, engines):
        await speak(
            worker, engines, draw.oldest_version, draw.iteration, may_change=worker.groups.tried.config.pauses_requests
        )
        return RolloutOutcome((), {}, 1, PromptCursor(0, draw.iteration + 1), 0, RolloutTally())

    async def evaluate(worker, version, engines):
        await speak(worker, engines, version, version)
        return (), {"rollout/failed": 0.0, "rollout/seconds": 1.0}

    async def sync(rank, engines, seconds):
        version = rank.held
        for engine in engines:
            await rank.groups.chance.pause()
            if engine.dead:
                raise WeightSyncError("an engine is gone")
            engine.held = version

    def save(rank, version):
        assert rank.held == version
        rank.groups.checkpoints[version] = rank.updates
        return []

    async def assemble(worker, *arguments):
        for calls in arguments[-1].values():
            await asyncio.gather(*calls)
        return Assembled((), trained=1, failed=0, metrics={})

    learn = Rank.do_update

    async def update(rank, version, *arguments):
        tried = rank.groups.tried
        evaluated = version % tried.config.eval.steps or tried.store.read_evaluation(version)
        saved = version % tried.config.ckpt.save_steps or not version or CheckpointStore(tried.store).get(version)
        if not (evaluated and saved):
            found.append(f"version {version} is trained before it is evaluated and saved")
        await rank.groups.chance.pause(10)
        return learn(rank, version, *arguments)

    monkeypatch.setattr(Actor, "__getattr__", late)
    for name, do in (("sync", sync), ("save", save), ("update", update)):
        monkeypatch.setattr(Rank, f"do_{name}", do)
    for name, do in (("rollout", rollout), ("evaluate", evaluate), ("assemble", assemble)):
        monkeypatch.setattr(Light, f"do_{name}", do)
    monkeypatch.setattr(Light, "do_score", lambda worker, *_: Scored((), {}, {}, {}, {}))
    monkeypatch.setattr(Light, "do_judge", lambda worker, *_: ({"eval/failed": 0.0}, [], []))
    return found


@pytest.fixture
def flows(monkeypatch):
    """Without a server: tasks and children are called as they are."""

    async def nothing(*arguments):
        pass

    async def child(flow, deployment, key, name, parameters):
        await flow.fn(**parameters)

    for name in TASKS:
        monkeypatch.setattr(iteration, name, getattr(iteration, name).fn)
    for name in ("report", "report_evaluation", "track"):
        monkeypatch.setattr(iteration, name, nothing)
    monkeypatch.setattr(train, "evaluate", train.evaluate.fn)
    monkeypatch.setattr(train, "report_evaluation", nothing)
    monkeypatch.setattr(train, "run_child", child)
    monkeypatch.setattr(train, "Progress", lambda run: SimpleNamespace(show=nothing))


class Tried:
    """A run that is tried until it ends."""

    def __init__(self, chance, monkeypatch):
        queue, partial = chance.choice([0, 1, 2, 9]), chance.random() < 0.5
        keys = ["run.max_restarts=1000", "eval.dataset=eval.jsonl", f"eval.steps={chance.choice([1, 2])}"]
        keys += [f"ckpt.save_steps={chance.choice([1, 3])}"]
        if chance.random() < 0.8:
            keys += ["train.async_enable=true", f"train.async_queue_size={queue}"]
            keys += ["train.partial_rollout_enable=true"] if partial and queue else []
        self.config, self.iterations = config(*keys), chance.choice([1, 2, 5, 8])
        self.chance, self.groups = chance, Groups(**EVERYBODY)
        self.groups.chance, self.groups.tried = chance, self
        self.store = RunStore("run", f"memory://{chance.random()}")
        self._monkeypatch = monkeypatch

    async def attempt(self, seconds):
        """Go on with it for so long."""
        self.groups.alive = {name: actor for name, actor in self.groups.alive.items() if not actor.dead}
        context = SimpleNamespace(config=self.config, store=self.store, device="cpu")
        session = RunSession(context, self.groups, Held(self.store))
        plan = RunPlan(prompts=8, dropped=0, fingerprint="f", iterations=self.iterations, total_steps=8)
        run = OpenRun("run", self.config, self.store, session, plan, tracker=None)
        self._monkeypatch.setitem(open_runs._OPEN, "run", run)

        async def plan_steps(facts):
            return PlannedSteps(policy=8, critic=8)

        killing = asyncio.create_task(self._kill_now_and_then())
        try:
            await session.open(plan_steps)
            await asyncio.wait_for(train.run_iterations(run), seconds)
        finally:
            killing.cancel()
            await session.close(keep_actors=True)

    async def _kill_now_and_then(self):
        within = self.chance.choice([0.05, 0.2, 5])
        while True:
            await asyncio.sleep(self.chance.random() * within)
            self.chance.choice(list(self.groups.alive.values())).dead = True


@pytest.mark.usefixtures("flows")
@pytest.mark.parametrize("seed", range(8))
async def test_whatever_dies_whenever_every_version_speaks_where_it_may_and_the_run_ends(seed, faults, monkeypatch):
    chance = Chance(seed)
    tried = Tried(chance, monkeypatch)

    for seconds in (chance.random() * 0.1, chance.random() * 0.1):
        with contextlib.suppress(TimeoutError, WorkerError):
            await tried.attempt(seconds)
    over = False
    while not over:
        with contextlib.suppress(WorkerError):  # who dies while it is started ends the attempt
            await tried.attempt(SECONDS)
            over = True

    assert faults == []
    recorded = [tried.store.stage(k, Stage.UPDATE)[0].body["digest"] for k in range(tried.iterations)]
    assert recorded == [digest("policy", range(k + 1)) for k in range(tried.iterations)]
    assert CheckpointStore(tried.store).get(tried.iterations)["digest"] == recorded[-1]
    assert tried.store.read_evaluation(tried.iterations) is not None
