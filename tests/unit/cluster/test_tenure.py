"""A controller's time in office: renewed while the store takes it, over when it does not, or when another process has it."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from cluster_samples import Method

from rlhf_core.cluster.tenure import Tenure
from rlhf_core.errors import ClusterLostError, LeaseError, StorageError, WorkerError

SECONDS = 0.6


class Lease:
    """Its renewals follow a script: an error, or nothing."""

    run_store = SimpleNamespace(run_id="run")

    def __init__(self, *script):
        self.script, self.seconds, self.renewals, self.events = list(script), SECONDS, 0, []
        self.expires_at = time.time() + SECONDS

    def renew(self):
        self.events.append("renew")
        time.sleep(0.02)  # a store takes its time
        if self.script and (error := self.script.pop(0)) is not None:
            raise error
        self.renewals += 1
        self.expires_at = time.time() + SECONDS
        self.events.append("renewed")

    def release(self):
        self.events.append("release")


class Groups:
    """The keeper of each attempt; ``deaths``: how many of them are gone when asked."""

    names = ("policy-0",)

    def __init__(self, deaths=0):
        self.deaths, self.keepers, self.kept = deaths, 0, []

    def keeper(self, seconds):
        self.keepers += 1
        return SimpleNamespace(renew=Method(self._renew))

    async def _renew(self, names):
        if self.deaths:
            self.deaths -= 1
            raise WorkerError("the keeper died")
        self.kept.append(names)


async def begun(lease, groups=None):
    tenure = Tenure(groups or Groups(), lease, SECONDS)
    tenure.begin()
    return tenure


async def test_both_leases_are_renewed_a_few_times_a_term() -> None:
    lease, groups = Lease(), Groups()
    tenure = await begun(lease, groups)

    await asyncio.sleep(2 * SECONDS)

    tenure.check()
    assert lease.renewals >= 3
    assert groups.kept[0] == ("policy-0",)
    await tenure.end()


async def test_a_store_that_is_away_for_less_than_a_term_is_survived() -> None:
    lease = Lease(StorageError("the store is away"))
    tenure = await begun(lease)

    await asyncio.sleep(SECONDS)

    tenure.check()
    assert lease.renewals >= 1
    await tenure.end()


async def test_a_store_that_stays_away_ends_it() -> None:
    tenure = await begun(Lease(*[StorageError("the store is away")] * 50))

    await asyncio.sleep(1.5 * SECONDS)

    with pytest.raises(LeaseError, match=r"has expired: the store did not take a renewal for 0\.6 s"):
        tenure.check()
    await tenure.end()


async def test_a_lease_that_another_process_took_ends_it_at_once() -> None:
    lease = Lease(LeaseError("taken over by another process"))
    tenure = await begun(lease)

    await asyncio.sleep(SECONDS / 2)

    with pytest.raises(LeaseError, match="the lease of run run is lost: taken over by another process"):
        tenure.check()
    assert lease.renewals == 0
    await tenure.end()


async def test_a_dead_keeper_is_made_again() -> None:
    groups = Groups(deaths=1)
    tenure = await begun(Lease(), groups)

    await asyncio.sleep(SECONDS)

    tenure.check()
    assert groups.keepers == 2
    assert groups.kept
    await tenure.end()


async def test_a_lost_cluster_is_what_ends_it_and_no_matter_of_the_lease() -> None:
    groups = Groups(deaths=1)
    tenure = await begun(Lease(), groups)
    groups.keeper = raising(ClusterLostError("the Ray cluster of this run is gone"))

    await asyncio.sleep(SECONDS / 2)

    with pytest.raises(ClusterLostError, match="the Ray cluster of this run is gone"):
        tenure.check()
    await tenure.end()


def raising(error):
    def call(*arguments):
        raise error

    return call


async def test_a_renewal_under_way_ends_before_the_lease_is_given_back() -> None:
    """Cancelled, it would go on in its thread, and take the lease back after the release."""
    lease = Lease()
    tenure = await begun(lease)
    await asyncio.sleep(0.01)

    await tenure.end()

    assert lease.events[-2:] == ["renewed", "release"]
