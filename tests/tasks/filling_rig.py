"""A run in one process: real log, real rollout and scoring workers; answers, rewards and crashes follow a script.

A prompt is named by its place in the order of draws: p0 is drawn first, whatever row it is. Its rewards are one a sample:
a number; None: the engine dies while it answers; "broken": its environment fails; another text: it has no reward, for that
reason.
"""

import asyncio
import uuid
from itertools import groupby
from types import SimpleNamespace

import numpy as np
from minimal_config import config
from task_samples import Notebook

from rlhf_core.agents import AgentExecutorBase
from rlhf_core.agents.loading import Agent
from rlhf_core.cluster import scoring_worker
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.cluster.scoring_worker import ScoringWorker
from rlhf_core.cluster.session import Updated
from rlhf_core.data.order import PromptOrder
from rlhf_core.errors import WorkerError
from rlhf_core.records import (
    ActionRange,
    Prompt,
    RewardResult,
    RewardStatus,
    Stage,
    StopReason,
    Trajectory,
    VersionSpan,
)
from rlhf_core.storage import CheckpointStore, RunStore
from tasks import run as run_module
from tasks.advantage import advantage
from tasks.due import checkpoint_due, is_last, iterations_to_do
from tasks.plan import make_plan
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run import OpenRun
from tasks.update import update

MIXED = (0.0, 1.0)  # a group that can teach something


class Killed(Exception):
    """The process is gone."""


def place(group_id):
    epoch, offset = group_id.split("-")
    return (int(epoch), int(offset))


class Answers(AgentExecutorBase):
    """Answers at once, or fails, by the script."""

    def __init__(self, script):
        self._script = script
        self.sampled = []  # (epoch, place) of each episode
        self.version_of = lambda episode: episode.iteration

    async def execute(self, episode):
        value = self._script(place(episode.group_id))[episode.sample_index]
        if value is None:
            await asyncio.sleep(0.2)
            raise WorkerError("the engine died")
        self.sampled.append(place(episode.group_id))
        if value == "broken":
            raise ValueError("the environment is broken")
        return [answered(episode, [self.version_of(episode)] * 2)]


def answered(episode, versions):
    """What was sampled: an answer with one token of each of ``versions``, in this order."""
    start = len(episode.prompt.token_ids)
    length = start + len(versions)
    return Trajectory(
        run_id=episode.run_id,
        iteration=episode.iteration,
        round=episode.round,
        prompt_id=episode.prompt.row_id,
        group_id=episode.group_id,
        sample_index=episode.sample_index,
        datasource="sums",
        prompt=episode.prompt.text,
        label=None,
        token_ids=np.arange(length, dtype=np.int32),
        action_ranges=(ActionRange(start, length),),
        rollout_logprobs=np.array([0.0] * start + [-0.5] * len(versions), np.float32),
        version_spans=tuple(_spans(versions, start)),
        stop_reason=StopReason.EOS,
        sampling=episode.sampling,
        answer="2",
    )


def _spans(versions, start):
    """Tokens of one version in a row are one span."""
    end = start
    for version, tokens in groupby(versions):
        begin, end = end, end + len(list(tokens))
        yield VersionSpan(begin, end, version)


class Rewards:
    """A reward source; a value that is no number is a failure with that text."""

    def __init__(self, script):
        self._script = script
        self.scored = 0

    async def score(self, requests):
        self.scored += len(requests)
        return [_result(self._script(place(asked.group_id))[asked.sample_index]) for asked in requests]

    async def score_normalised(self, requests, state):
        before = state.get("scored", {"count": 0.0})["count"]
        return await self.score(requests), {"scored": {"count": before + len(requests), "mean": 0.0, "m2": 1.0}}


def _result(value):
    if isinstance(value, str):
        return RewardResult(RewardStatus.ERROR, error=value)
    return RewardResult(RewardStatus.OK, value, value)


class Session:
    """The processes of a run without processes. ``crash``: name of the act that is the last one, and its number."""

    def __init__(self, store, checked, prompts, script, crash=None):
        context = SimpleNamespace(run_id="run", config=checked, store=store, enter=lambda worker: None)
        self.config = checked
        self.player, self.source = Answers(script), Rewards(script)
        self._rollout, self._scoring = RolloutWorker(context), ScoringWorker(context)
        self._engines = []
        self._rollout._agent = Agent(self.player, "a script")
        self._rollout._tokenizer = self._rollout._images = None
        self._rollout._end_ids = frozenset()
        self._rollout._prompts = [Prompt(f"row-{i}", "sums", f"{i} =", [11, 12]) for i in range(prompts)]
        self._rollout._order = PromptOrder([prompts], seed=3)
        self._scoring._source = self.source
        self._crash, self._acts = crash, {}
        self.draws = []

    def check_lease(self):
        pass

    async def heal(self, version, work):
        return await work()

    async def with_engines(self, oldest, newest, work):
        return await work()

    async def with_scoring(self, work):
        return await work()

    async def rollout(self, draw):
        self._act("rollout")
        self.draws.append(draw)
        return await self._rollout.rollout(draw, self._engines)

    async def score(self, iteration, parts, norm_state, groups=None):
        found = await self._scoring.score(iteration, parts, norm_state, groups)
        self._act("score")
        return found

    async def check_tokens(self, parts):
        self.checked = parts

    async def assemble(self, iteration, rollout, reward, kl_coef):
        asked = [] if self._scoring._config.reuses_logprobs else [(rollout, reward)]
        answers = {"policy": asked, "reference": [], "critic": []}
        return await self._scoring.assemble(iteration, rollout, reward, kl_coef, answers)

    async def update(self, iteration, experience, kl_coef):
        self._act("update")
        return Updated({}, {"digest": f"digest-{iteration}"}, iteration + 1)

    def _act(self, name):
        number = self._acts.get(name, 0)
        self._acts[name] = number + 1
        if self._crash == (name, number):
            raise Killed(f"{name} {number}")


class Rig:
    """A run that can be killed and started again."""

    run_id = "run"
    replay = None
    session_kind = Session

    def __init__(self, monkeypatch, prompts, script, *overrides):
        self._monkeypatch, self._script = monkeypatch, script
        root = f"memory://{uuid.uuid4().hex}"
        self.config = config(f"storage.root={root}", "rollout.publish_groups=1", *overrides)
        self.store = RunStore("run", root)
        self.prompts = prompts
        self.plan = make_plan(self.config, SimpleNamespace(prompts=prompts, dropped=0, fingerprint="f"))
        self._act_as_ranks()

    def _act_as_ranks(self):
        async def merged(references):
            """Log-probs of the trained rows, as the ranks would compute them."""
            ((played, scored),) = references
            rows = scoring_worker.rows_of_batch(self.store, played, scored)
            return {row.key: row.rollout_logprobs for row in rows}

        self._monkeypatch.setattr(scoring_worker, "_merged", merged)

    def start(self, script=None, crash=None):
        """A new process of the run."""
        session = self.session_kind(self.store, self.config, self.prompts, script or self._script, crash)
        run = OpenRun(self.run_id, self.config, self.store, session, self.plan, Notebook(), replay=self.replay)
        self._monkeypatch.setitem(run_module._OPEN, self.run_id, run)
        return run

    async def train(self, run, iterations=None):
        """What the flow does. Returns the iterations that were run."""
        done = []
        for iteration in iterations_to_do(run)[:iterations]:
            for stage in (rollout, reward, advantage, update):
                await stage.fn(self.run_id, iteration)
            done.append(iteration)
            if checkpoint_due(run, iteration + 1):
                CheckpointStore(self.store).commit(iteration + 1, {"digest": f"digest-{iteration}"}, [])
            if is_last(run, iteration + 1):
                break
        return done

    def body(self, iteration, stage=Stage.ROLLOUT):
        return self.store.stage(iteration, stage)[0].body

    def trained(self, iteration):
        """Places of the groups whose rows are in the experience of an iteration."""
        parts = self.store.stage(iteration, Stage.EXPERIENCE)[0].parts
        return sorted({place(row.group_id) for row in self.store.read_experience(parts)})

    @property
    def batches(self):
        """Of every completed iteration; places only, where there is one epoch."""
        found = [self.trained(iteration) for iteration in self.store.completed_iterations()]
        return [[offset for _, offset in batch] for batch in found] if self.config.train.num_episodes == 1 else found

    @property
    def total(self):
        """The ledger of the whole run."""
        return self.body(self.store.completed_iterations()[-1], Stage.EXPERIENCE)["ledger_total"]


def always(rewards):
    """Every prompt gets these rewards."""
    return lambda _: rewards


def by_place(rewards, otherwise):
    """``rewards``: place in epoch 0, or (epoch, place), to rewards."""
    return lambda found: rewards.get(found, rewards.get(found[1], otherwise))
