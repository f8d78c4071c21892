import dataclasses
import multiprocessing
import os
import pickle
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_core.errors import LeaseError
from rlhf_core.storage import LeaseOwner, LeaseRecord, acquire, holder
from rlhf_core.storage.lease import KEPT_GENERATIONS


def somebody(**changes):
    return dataclasses.replace(LeaseOwner.of_this_process(), **changes)


@pytest.fixture
def dead_process():
    """The owner that a killed process was."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: (queue.put(LeaseOwner.of_this_process()), time.sleep(60)))
    process.start()
    owner = queue.get()
    assert not owner.is_known_dead
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return owner


def test_nobody_holds_a_new_run(run_store):
    assert holder(run_store) is None


def test_a_live_owner_is_not_disturbed_and_named(run_store):
    acquire(run_store, somebody(), 60)

    with pytest.raises(
        LeaseError, match=rf"run 'run' is held by process {os.getpid()} on .* until 20\d\d-.*: stop that"
    ):
        acquire(run_store, somebody(), 60)


def test_an_owner_on_another_machine_is_not_known_to_be_dead(run_store):
    """The same host name and a process id that is free here: it may be another container."""
    acquire(run_store, somebody(machine="another", pid=2**22 + 1), 60)

    with pytest.raises(LeaseError, match="is held by process"):
        acquire(run_store, somebody(), 60)


def test_an_expired_lease_is_taken_over(run_store):
    late = acquire(run_store, somebody(machine="another"), 0.05)
    time.sleep(0.06)

    taken = acquire(run_store, somebody(), 60)

    assert taken.generation == 2
    with pytest.raises(LeaseError, match=rf"went to {re.escape(str(taken.owner))} .*: stop writing"):
        late.renew()


def test_the_lease_of_a_dead_process_is_taken_over_at_once(run_store, dead_process):
    acquire(run_store, dead_process, 3600)

    assert acquire(run_store, somebody(), 60).generation == 2


def test_a_process_id_used_again_is_another_process(run_store):
    acquire(run_store, somebody(started=1.0), 3600)

    assert acquire(run_store, somebody(), 60).generation == 2


def test_renewal_holds_it_longer(run_store):
    lease = acquire(run_store, somebody(machine="another"), 0.2)
    for _ in range(4):
        time.sleep(0.1)
        lease.renew()

    with pytest.raises(LeaseError):
        acquire(run_store, somebody(), 60)
    assert lease.expires_at > time.time()


def test_a_late_renewal_that_nobody_overtook_holds(run_store):
    lease = acquire(run_store, somebody(), 0.01)
    time.sleep(0.02)

    lease.renew()

    assert holder(run_store).owner == lease.owner


def test_release_lets_the_next_one_in_at_once(run_store):
    acquire(run_store, somebody(), 3600).release()

    assert acquire(run_store, somebody(), 60).generation == 3


def test_release_after_a_take_over_leaves_the_new_owner_alone(run_store):
    late = acquire(run_store, somebody(machine="another"), 0.0)
    taken = acquire(run_store, somebody(), 60)

    late.release()

    assert holder(run_store).owner == taken.owner
    taken.renew()


def test_the_same_owner_may_acquire_again(run_store):
    owner = somebody()
    acquire(run_store, owner, 60)

    assert acquire(run_store, owner, 60).generation == 2


def test_of_sixteen_racing_owners_exactly_one_takes_over(run_store):
    acquire(run_store, somebody(machine="another"), 0.0)

    def take(_):
        try:
            return acquire(run_store, somebody(), 60).owner
        except LeaseError:
            return None

    with ThreadPoolExecutor(16) as pool:
        winners = [owner for owner in pool.map(take, range(16)) if owner]

    assert winners == [holder(run_store).owner]


def test_of_a_late_renewal_and_a_take_over_exactly_one_succeeds(run_store):
    for _ in range(10):
        late = acquire(run_store, somebody(machine="another"), 0.0)

        def attempt(act):
            try:
                act()
            except LeaseError:
                return 0
            return 1

        with ThreadPoolExecutor(2) as pool:
            acts = (late.renew, lambda: acquire(run_store, somebody(machine="another"), 0.0))
            renewed, taken = pool.map(attempt, acts)

        owner_stayed = holder(run_store).owner == late.owner
        assert taken == (not owner_stayed)
        assert renewed or taken


def test_a_claimant_that_slept_through_renewals_does_not_win_an_old_generation(run_store, monkeypatch):
    """It saw generation 1 expire, slept, and finds number 2 free: swept, long after the owner's late renewals."""
    lease = acquire(run_store, somebody(), 60)
    seen = [LeaseRecord(1, somebody(), 0.0, released=False)]
    for _ in range(KEPT_GENERATIONS + 3):
        lease.renew()
    monkeypatch.setattr("rlhf_core.storage.lease.holder", lambda run: seen.pop() if seen else holder(run))

    with pytest.raises(LeaseError, match="went to"):
        acquire(run_store, somebody(), 60)
    lease.renew()
    assert run_store.objects.list("lease")[0] != "lease/00000002.json"


def test_old_generations_are_swept(run_store):
    lease = acquire(run_store, somebody(), 60)
    for _ in range(20):
        lease.renew()

    assert len(run_store.objects.list("lease")) == KEPT_GENERATIONS


def test_a_lease_pickles(local_run):
    lease = pickle.loads(pickle.dumps(acquire(local_run, somebody(), 60)))

    lease.renew()

    assert lease.generation == 2
