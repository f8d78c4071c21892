"""A session over scripted actors; the log is real."""

import time
import uuid
from types import SimpleNamespace

from minimal_config import config
from scripted_actors import Groups, digest

from rlhf_core.cluster.session import PlannedSteps, RunSession
from rlhf_core.records import Stage, StageManifest
from rlhf_core.storage import RunStore

EVERYBODY = {"engine": 2, "policy": 1, "critic": 1, "reference": 1, "reward": 2, "rollout": 1, "scoring": 1}


class Held:
    """The run's lease in storage."""

    seconds, released = 60.0, False

    def __init__(self, store):
        self.run_store, self.expires_at = store, time.time() + 60

    def renew(self):
        self.expires_at = time.time() + 60

    def release(self):
        self.released = True


class Run:
    """A session whose log holds so many updates. ``overrides``: of its configuration; ``counts``: of its actors by role."""

    def __init__(self, updates=0, *overrides, **counts):
        checked = config("run.max_restarts=1", *overrides)
        store = RunStore("run", f"memory://{uuid.uuid4().hex}")
        self.groups, self.lease = Groups(**(EVERYBODY | counts)), Held(store)
        self.session = RunSession(SimpleNamespace(config=checked, store=store, device="cpu"), self.groups, self.lease)
        for k in range(updates):
            store.commit(StageManifest("run", k, Stage.EXPERIENCE, (), 0, 0, k))
            done = range(k + 1)
            body = {"digest": digest("policy", done), "critic_digest": digest("critic", done), "kl_coef": 0.1}
            store.commit(StageManifest("run", k, Stage.UPDATE, (), 0, 0, k, body=body))

    async def open(self):
        async def plan_steps(facts):
            assert facts == "facts"
            return PlannedSteps(policy=10, critic=12)

        await self.session.open(plan_steps)
        return self

    async def at(self, version):
        """Open, at the version; what was made and asked until now is forgotten."""
        await self.open()
        await self.ready(version)
        self.groups.made.clear()
        self.groups.calls.clear()
        return self

    async def ready(self, version):
        """For a whole iteration: what learns, and what speaks, at the version."""

        async def nothing():
            pass

        await self.session.heal(version, nothing)
        await self.session.with_engines(version, version, nothing)

    def __getitem__(self, name):
        return self.groups.alive[name]

    def asked(self, *methods):
        return [(role, index, method) for role, index, method in self.groups.calls if method in methods]
