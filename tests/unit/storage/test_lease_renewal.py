"""A lease that is held while a block lasts."""

import asyncio

import pytest

from rlhf_core.errors import LeaseError, StorageError
from rlhf_core.storage import LeaseOwner, RunStore, acquire, holder
from rlhf_core.storage.lease_renewal import renewed, require


@pytest.fixture
def store(tmp_path):
    return RunStore("run", str(tmp_path))


def take(store, seconds=0.4):
    return acquire(store, LeaseOwner.of_this_process(), seconds)


async def test_it_is_renewed_while_the_block_lasts_and_free_afterwards(store):
    async with renewed(take(store)) as lease:
        await asyncio.sleep(0.6)
        require(lease)
        with pytest.raises(LeaseError, match="is held by"):
            take(store)

    assert holder(store).is_free


async def test_a_store_that_is_away_for_less_than_a_term_is_survived(store, monkeypatch):
    lease, away = take(store), [StorageError("away")]
    renew = lease.renew

    def fails_once():
        if away:
            raise away.pop()
        renew()

    monkeypatch.setattr(lease, "renew", fails_once)
    async with renewed(lease):
        await asyncio.sleep(0.5)
        require(lease)

    assert away == []


async def test_nothing_is_written_after_it_was_lost(store, monkeypatch):
    lease = take(store, 0.2)

    def lost():
        raise LeaseError("it went to another")

    monkeypatch.setattr(lease, "renew", lost)
    async with renewed(lease):
        await asyncio.sleep(0.3)
        with pytest.raises(LeaseError, match="has expired"):
            require(lease)
