"""Actors without processes: each answers by a script until it is dead, and the groups write down what was made and asked."""

import inspect
from types import SimpleNamespace

from cluster_samples import Method
from ray.exceptions import RayActorError

from rlhf_core.cluster.placement import LIGHT_WORKERS
from rlhf_core.cluster.rank_worker import NOT_STARTED
from rlhf_core.errors import CorruptShardError, LeaseError
from rlhf_core.generation.sleeping import NO_WEIGHTS


class Actor:
    """``actor.method.remote(...)`` answers what ``do_method`` says."""

    def __init__(self, groups, role, index):
        self.groups, self.role, self.index = groups, role, index
        self.dead = False
        self.dies_in = None  # a method
        self.fails = {}  # method -> what it raises

    def __getattr__(self, name):
        do = object.__getattribute__(self, f"do_{name}")

        async def call(*arguments, **named):
            self.dead = self.dead or name == self.dies_in
            if self.dead:
                raise RayActorError()
            self.groups.calls.append((self.role, self.index, name))
            if name in self.fails:
                raise self.fails[name]
            answer = do(*arguments, **named)
            return await answer if inspect.iscoroutine(answer) else answer

        return Method(call)

    def do_ping(self):
        return None

    def do_shutdown(self):
        return None


class Rank(Actor):
    """A process of a model that learns; its weights are the list of the updates it took."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.held, self.updates, self.starts, self.damaged = NOT_STARTED, (), [], set()
        self.there = "all"  # of it on its GPU: "all", "parameters", "nothing"

    def do_rendezvous(self):
        return f"host-{self.index}", 29500

    def do_start(self, *arguments):
        self.starts.append(arguments)
        self.held = max(self.held, 0)
        return self.held

    def do_version(self):
        return self.held

    def do_offload(self, keep_parameters=False):
        self.there = "parameters" if keep_parameters and self.there != "nothing" else "nothing"

    def do_reload(self, parameters_only=False):
        self.there = "parameters" if parameters_only and self.there != "all" else "all"

    def do_restore(self, version):
        assert self.there == "all"
        if version in self.damaged:
            raise CorruptShardError(f"checkpoint {version} is damaged")
        self.held, self.updates = version, self.groups.checkpoints[version]
        return version

    def do_update(self, iteration, *arguments):
        assert (self.held, self.there) == (iteration, "all")
        self.updates, self.held = (*self.updates, iteration), iteration + 1
        return {f"{self.role}/loss": 0.5}

    def do_digest(self):
        assert self.there == "all"
        return digest(self.role, self.updates)

    def do_optimizer_steps(self):
        return len(self.updates)

    def do_save(self, version):
        return [f"{self.role} {version}-{self.index}"]

    def do_logprobs(self, rollout, reward):
        assert self.there == "all"
        return {}

    def do_values(self, rollout, reward):
        assert self.there == "all"
        return {}

    def do_sync(self, engines, timeout):
        assert self.there != "nothing"
        for engine in engines:
            engine.held = self.held


class Engine(Actor):
    """A rollout engine."""

    held = NOT_STARTED
    awake = True
    level = 1  # of its sleep

    def do_start(self):
        self.held = max(self.held, 0)

    def do_sleep(self):
        self.awake = False
        if self.level == 2:
            self.held = NO_WEIGHTS

    def do_wake_up(self):
        self.awake = True

    def do_drop_requests(self):
        return None

    def do_version(self):
        return self.held


class RewardModel(Actor):
    """A copy of the reward model: the first reads rows of 64 tokens, each other one longer ones."""

    there = "all"

    def do_start(self):
        return 64 + self.index

    def do_offload(self):
        self.there = "nothing"

    def do_reload(self):
        self.there = "all"


class Light(Actor):
    """The rollout or the scoring worker."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.starts, self.answers, self.said = [], None, None

    def do_start(self, *arguments):
        self.starts.append(arguments)
        return "facts"

    def do_rollout(self, *arguments):
        return self.said

    def do_score(self, *arguments):
        return self.said

    def do_evaluate(self, *arguments):
        return (), {"rollout/failed": 0.0, "rollout/seconds": 1.0}

    def do_judge(self, *arguments):
        return self.said

    async def do_assemble(self, iteration, rollout, reward, kl_coef, answers):
        for calls in answers.values():
            for call in calls:
                await call


KINDS = {"engine": Engine, "reward": RewardModel, "rollout": Light, "scoring": Light}


class Groups:
    """The actors of a run, by name. ``counts``: by role."""

    def __init__(self, **counts):
        self._counts = counts
        self.checkpoints = {}  # version -> updates that its weights took
        self.alive, self.made, self.calls, self.killed = {}, [], [], []

    @property
    def names(self):
        return [name for role in self._counts for name in self.names_of(role)]

    def check_cluster(self):
        pass

    def count(self, role):
        return self._counts.get(role, 0)

    def names_of(self, role):
        return [role] if role in LIGHT_WORKERS else [f"{role}-{index}" for index in range(self.count(role))]

    def actor(self, role, index=0):
        name = self.names_of(role)[index]
        if name not in self.alive:
            self.alive[name] = KINDS.get(role, Rank)(self, role, index)
            self.made.append(name)
        return self.alive[name]

    def keeper(self, seconds):
        return SimpleNamespace(renew=Method(self._renew))

    async def _renew(self, names):
        return None

    def reserve(self, seconds):
        self.calls.append(("slots", None, "reserve"))

    def discard(self):
        self.kill([*self.names, "keeper"])

    def kill(self, names):
        self.killed += names
        for name in names:
            if name in self.alive:
                self.alive.pop(name).dead = True


class Office:
    """A tenure that lasts, or has ended."""

    over = False

    def check(self):
        if self.over:
            raise LeaseError("the lease is lost")


def digest(role, updates):
    return f"{role} after {list(updates)}"
