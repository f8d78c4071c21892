"""Ranks of a model that die, run ahead or hold half an update: brought back to the version that the log names.

The log and its checkpoints are real; a rank follows a script: its weights are the list of the updates it took.
"""

import asyncio
import uuid

import pytest
from minimal_config import config
from scripted_actors import Groups, Office, Rank, digest

from rlhf_core.cluster import rank_group
from rlhf_core.cluster.rank_group import RankGroup, Recorded, TrainedGroup
from rlhf_core.cluster.rank_worker import NOT_STARTED, Seat
from rlhf_core.errors import LeaseError, TrainingError, WorkerError
from rlhf_core.storage import CheckpointStore, RunStore, record_world
from rlhf_core.storage import World as StoredWorld

HALF_UPDATED = -2


class World:
    """A trained group of a run whose log holds so many updates, and checkpoints of some versions."""

    def __init__(self, ranks=1, checkpoints=(), must_match=True):
        self.store = RunStore("run", f"memory://{uuid.uuid4().hex}")
        self.groups, self.office = Groups(critic=ranks), Office()
        limits = config().run
        self.group = TrainedGroup("critic", "critic_digest", self.store, must_match, self.groups, self.office, limits)
        self.group.total_steps = 12
        self.log = {}  # iteration -> digest that the log has of it
        for version in checkpoints:
            self.groups.checkpoints[version] = tuple(range(version))
            body = {"digest": "of the policy", "critic_digest": digest("critic", range(version))}
            CheckpointStore(self.store).commit(version, body, [])

    async def begin(self):
        self.group.find()
        await self.group.begin()
        return self

    async def train(self, until):
        for iteration in range(until):
            await self.group.call("update", iteration, what="update")
        return self

    async def recorded(self, iteration):
        said = self.log.get(iteration, digest("critic", range(iteration + 1)))
        return Recorded(said, lambda: self.group.call("update", iteration, what="again"))

    async def ensure(self, version):
        await self.group.ensure(version, self.recorded)

    @property
    def state(self):
        return [(rank.held, list(rank.updates)) for rank in self.group.ranks]


async def test_ranks_at_the_version_are_left_alone():
    world = await (await World(ranks=2).begin()).train(3)
    before = list(world.group.ranks)

    await world.ensure(3)

    assert world.group.ranks == before
    assert world.state == [(3, [0, 1, 2])] * 2


@pytest.mark.parametrize("checkpoints", [(), (2,), (1, 2), (2, 4)])
async def test_a_dead_rank_costs_the_updates_since_the_newest_checkpoint(checkpoints):
    """Version 4 of the log is ahead of version 3: its checkpoint is not looked at."""
    world = await (await World(ranks=2, checkpoints=checkpoints).begin()).train(3)
    world.group.ranks[1].dead = True

    await world.ensure(3)

    assert world.state == [(3, [0, 1, 2])] * 2
    assert len(world.groups.made) == 4  # the one that lived could not meet a new one
    assert [rank.starts[0][1] for rank in world.group.ranks] == [12, 12]


@pytest.mark.parametrize("held", [4, HALF_UPDATED])
async def test_weights_that_the_log_does_not_know_are_thrown_away(held):
    world = await (await World(checkpoints=[1]).begin()).train(3)
    world.group.ranks[0].held = held

    await world.ensure(3)

    assert world.state == [(3, [0, 1, 2])]
    assert len(world.groups.made) == 2


async def test_a_group_that_was_just_made_goes_to_the_version_of_the_log_as_it_is():
    world = await World(checkpoints=[2]).begin()

    await world.ensure(3)

    assert world.state == [(3, [0, 1, 2])]
    assert len(world.groups.made) == 1


async def test_a_damaged_checkpoint_is_passed_over(monkeypatch):
    world = World(checkpoints=[1, 2])
    monkeypatch.setattr(Rank, "do_restore", damaged(Rank.do_restore, {2}))
    await world.begin()

    await world.ensure(3)

    assert world.state == [(3, [0, 1, 2])]
    assert len(world.groups.made) == 2  # whatever the first one holds now


def damaged(restore, versions):
    def attempt(rank, version):
        rank.damaged = versions
        return restore(rank, version)

    return attempt


@pytest.mark.parametrize(("checkpoints", "what"), [((), "applying iteration 1 again"), ((2,), "checkpoint 2")])
async def test_other_weights_than_those_of_the_log_are_refused(checkpoints, what):
    world = await World(checkpoints=checkpoints).begin()
    world.groups.checkpoints[2] = (0, 0)
    world.log[1] = "other weights"

    with pytest.raises(TrainingError, match=f"{what} gave the critic weights critic after.*, the log says "):
        await world.ensure(2)


async def test_where_kernels_promise_nothing_other_weights_are_only_reported():
    world = await World(must_match=False).begin()
    world.log[1] = "other weights"

    await world.ensure(2)

    assert world.state == [(2, [0, 1])]


async def test_what_a_checkpoint_holds_must_match_wherever_it_is_loaded():
    world = await World(checkpoints=[2], must_match=False).begin()
    world.groups.checkpoints[2] = (0, 7)

    with pytest.raises(TrainingError, match=r"checkpoint 2 gave the critic weights .*, the log says"):
        await world.ensure(2)


class Moved(World):
    """Iteration 2 and later were trained on two ranks, those before on one; the checkpoint of version 1 is universal."""

    def __init__(self, **arguments):
        super().__init__(ranks=2, checkpoints=[1], **arguments)
        self.store.write_run({"config": {"critic": {"num_nodes": 1}}, "cpu_threads": 1})
        record_world(self.store, StoredWorld(2, {"critic.num_nodes": 2}, 1))


async def test_updates_of_other_ranks_are_only_reported(caplog):
    moved = await Moved().begin()
    moved.log[1] = "weights of one rank"

    await moved.ensure(2)

    assert moved.state == [(2, [0, 1])] * 2
    assert (
        "applying iteration 1 again on other ranks, or with another ZeRO stage, than when it was recorded"
        in caplog.text
    )


async def test_those_that_follow_them_are_only_reported_too():
    moved = await Moved().begin()
    moved.log |= {1: "weights of one rank", 2: "what became of other weights"}

    await moved.ensure(3)

    assert moved.state == [(3, [0, 1, 2])] * 2


async def test_updates_of_these_ranks_must_match():
    moved = Moved()
    moved.groups.checkpoints[2] = (0, 1)
    body = {"digest": "of the policy", "critic_digest": digest("critic", [0, 1])}
    CheckpointStore(moved.store).commit(2, body, [])
    await moved.begin()
    moved.log[2] = "other weights"

    with pytest.raises(TrainingError, match="applying iteration 2 again gave the critic weights"):
        await moved.ensure(3)


async def test_the_digest_is_the_groups_own():
    """The checkpoint's ``digest`` is that of the policy."""
    world = await World(checkpoints=[2]).begin()

    await world.ensure(2)

    assert await world.group.digest() == digest("critic", [0, 1])


async def test_ranks_that_differ_are_an_error():
    world = await (await World(ranks=2).begin()).train(1)
    world.group.ranks[1].updates = (0, 0)

    with pytest.raises(TrainingError, match="the critic's ranks hold different weights"):
        await world.group.digest()


async def test_a_group_without_ranks_has_nothing_to_do():
    world = await World(ranks=0).begin()

    await world.ensure(3)

    assert (world.group.ranks, await world.group.save(3)) == ([], [])


async def test_every_rank_writes_its_part_of_a_checkpoint():
    world = await World(ranks=2).begin()

    assert await world.group.save(3) == ["critic 3-0", "critic 3-1"]


# --- starting


async def test_ranks_meet_at_the_first_one():
    world = await World(ranks=2).begin()

    seats = [rank.starts[0][0] for rank in world.group.ranks]

    assert seats == [Seat(0, 2, "host-0", 29500), Seat(1, 2, "host-0", 29500)]


async def test_ranks_that_do_not_meet_get_no_seat():
    groups = Groups(reward=2)
    group = RankGroup("reward", groups, Office(), config().run, meet=False)
    group.find()

    assert await group.start() == [64, 65]
    assert "rendezvous" not in [method for _, _, method in groups.calls]


@pytest.mark.parametrize("other", ["dead", "never started"])
async def test_a_rank_of_an_earlier_attempt_does_not_wait_for_one_that_is_new(other):
    world = World(ranks=2)
    for index in range(2):
        world.groups.actor("critic", index).held = 0
    second = world.groups.actor("critic", 1)
    second.dead, second.held = other == "dead", NOT_STARTED

    await world.begin()

    assert world.state == [(0, [])] * 2
    assert len(world.groups.made) == 4


async def test_whole_groups_of_an_earlier_attempt_are_found():
    world = await (await World(ranks=2).begin()).train(2)

    again = await World.begin(world)

    assert again.state == [(2, [0, 1])] * 2
    assert len(world.groups.made) == 2


# --- being asked


async def test_what_a_rank_complains_of_while_its_peer_is_dead_is_the_peers_death():
    world = await World(ranks=2).begin()
    first, second = world.group.ranks
    first.fails["update"], second.dead = RuntimeError("connection closed by peer"), True

    with pytest.raises(WorkerError):
        await world.group.call("update", 0, what="update of iteration 0")


async def test_what_a_rank_complains_of_among_the_living_is_its_own():
    world = await World(ranks=2).begin()
    world.group.ranks[0].fails["update"] = RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await world.group.call("update", 0, what="update")


async def test_a_process_that_lost_its_lease_asks_and_ends_nobody():
    world = await World().begin()
    world.office.over = True

    for act in (world.group.call("update", 0, what="update"), world.group.kill()):
        with pytest.raises(LeaseError):
            await act
    assert world.state == [(0, [])]
    assert list(world.groups.alive) == ["critic-0"]


async def test_ranks_that_are_busy_for_an_earlier_attempt_are_waited_for(monkeypatch):
    """Taken for dead, they would be trained anew from the last checkpoint on."""
    monkeypatch.setattr(rank_group, "PING_SECONDS", 0.05)
    world = await (await World(ranks=2).begin()).train(3)
    before, saved = list(world.group.ranks), asyncio.Event()

    async def answer():
        await saved.wait()
        return 3

    monkeypatch.setattr(before[0], "do_ping", answer, raising=False)
    monkeypatch.setattr(before[0], "do_version", answer, raising=False)
    asyncio.get_running_loop().call_later(0.3, saved.set)

    await world.begin()

    assert world.group.ranks == before
