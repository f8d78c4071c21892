"""How many processes a run has had: what is written down, and which updates can be made again bit for bit."""

import pytest

from rlhf_core.errors import CorruptShardError
from rlhf_core.storage import RunStore, World, is_comparable, read_worlds, record_world

RANKS, ENGINES = "actor.num_gpus_per_node", "vllm.num_engines"


@pytest.fixture
def store(tmp_path):
    store = RunStore("run", str(tmp_path))
    store.write_run({"config": {"actor": {"num_gpus_per_node": 1}, "vllm": {"num_engines": 1}}, "cpu_threads": 2})
    return store


def world(since, ranks, threads=2, engines=1):
    return World(since, {RANKS: ranks, ENGINES: engines}, threads)


def test_a_run_that_never_changed_has_no_record(store):
    assert read_worlds(store) == []
    assert is_comparable([], 7)


def test_worlds_come_in_order_after_that_of_the_run_document(store):
    for later in (world(3, 2, 1), world(3, 4, 1), world(8, 1, 2)):
        record_world(store, later)

    assert read_worlds(store) == [world(0, 1), world(3, 2, 1), world(3, 4, 1), world(8, 1, 2)]


@pytest.mark.parametrize(
    ("later", "comparable"),
    [
        ([world(2, 2)], [2, 3, 4]),
        ([world(0, 2)], [0, 1, 2, 3, 4]),
        ([world(2, 2), world(3, 1)], [0, 1, 3, 4]),  # back to where it began
        ([world(2, 1, threads=1)], [2, 3, 4]),
        ([world(2, 1, engines=4)], [0, 1, 2, 3, 4]),  # no update asks an engine
    ],
)
def test_only_updates_of_the_newest_world_come_out_the_same(store, later, comparable):
    for one in later:
        record_world(store, one)

    assert [i for i in range(5) if is_comparable(read_worlds(store), i)] == comparable


def test_a_key_that_did_not_exist_when_the_run_began_is_another_world(store):
    record_world(store, World(2, {RANKS: 1, "critic.num_nodes": 1}, 2))

    assert [is_comparable(read_worlds(store), iteration) for iteration in (1, 2)] == [False, True]


def test_a_damaged_record_is_an_error(store):
    record_world(store, world(3, 2))
    [path] = store.objects.list("worlds")
    store.objects.put(path, store.objects.read(path).replace(b'"since":3', b'"since":4'))

    with pytest.raises(CorruptShardError, match=r"worlds/00000001.json is damaged"):
        read_worlds(store)
