"""A run that is resumed with other processes: when it may be, what is recorded, and what is then due."""

import pytest
from minimal_config import config
from task_samples import complete, facts, open_run

from rlhf_core.errors import ConfigError
from rlhf_core.storage import CheckpointStore, RunStore, World, read_worlds, worlds_in_words
from tasks.due import checkpoint_due, iterations_to_do
from tasks.opening import run_document
from tasks.plan import make_plan
from tasks.resume import check_resume, stored_config
from tasks.worlds import move, ranks_change, world_keys

UNIVERSAL = "ds.use_universal_ckpt=true"
RANKS, STAGE = "actor.num_gpus_per_node=2", "ds.zero_stage=3"


@pytest.fixture
def store(tmp_path):
    return started(RunStore("run", str(tmp_path)))


def started(store, *overrides):
    checked = config(*overrides)
    store.write_run({**run_document(checked, "run", make_plan(checked, facts(8)), "flow"), "cpu_threads": 2})
    return store


def resumed(store, *overrides):
    return check_resume(store.read_run(), config(*overrides), store, "must", None)


def save(store, version, universal):
    CheckpointStore(store).commit(version, {"universal": universal}, [])


@pytest.mark.parametrize("overrides", [(RANKS,), (STAGE,), (RANKS, STAGE, "ref.num_nodes=2", "vllm.num_engines=2")])
def test_other_processes_go_on_from_a_universal_checkpoint(store, overrides):
    save(store, 1, universal=True)

    changed = resumed(store, *overrides)

    assert set(changed) == {override.partition("=")[0] for override in overrides}


@pytest.mark.parametrize("saved", [[(1, False)], [(1, True), (2, False)], [(1, None)], []])
def test_nothing_else_is_gone_on_from(store, saved):
    """The newest counts; one of an early version of this program says nothing of itself."""
    for version, universal in saved:
        CheckpointStore(store).commit(version, {} if universal is None else {"universal": universal}, [])

    said = (
        r"actor.num_gpus_per_node: 1 in the run, 2 now.*only from universal.*ds.use_universal_ckpt=true from the start"
    )
    with pytest.raises(ConfigError, match=said):
        resumed(store, RANKS)


def test_before_the_first_checkpoint_it_is_enough_to_ask_for_universal_ones(store):
    assert set(resumed(store, RANKS, UNIVERSAL)) == {"actor.num_gpus_per_node"}
    assert resumed(store, UNIVERSAL) == {}


def test_what_is_computed_never_changes(store):
    save(store, 1, universal=True)

    with pytest.raises(ConfigError, match=r"actor.adam.lr.*: resume with the same, or choose another run_id$"):
        resumed(store, RANKS, "actor.adam.lr=0.5")


def test_the_newest_processes_are_those_that_a_run_goes_on_with(store):
    """And those that its configuration has wherever it is read from the log."""
    save(store, 1, universal=True)
    move(store, config(RANKS, STAGE), cpu_threads=1)

    assert resumed(store, RANKS, STAGE) == {}
    assert set(resumed(store)) == {"actor.num_gpus_per_node", "ds.zero_stage"}
    assert stored_config(store) == config(RANKS, STAGE)


def test_a_move_is_recorded_from_the_version_where_it_happens(tmp_path, caplog):
    run = open_run(tmp_path)
    started(run.store)
    complete(run, 0)
    complete(run, 1)

    move(run.store, config(RANKS), cpu_threads=1)

    first, second = read_worlds(run.store)
    assert (first.since, first.settings["actor.num_gpus_per_node"], first.cpu_threads) == (0, 1, 2)
    assert second == World(2, first.settings | {"actor.num_gpus_per_node": 2}, 1)
    assert set(second.settings) == set(world_keys(config()))
    said = "from version 0: actor.num_gpus_per_node=1; from version 2: actor.num_gpus_per_node=2"
    assert worlds_in_words(read_worlds(run.store)) == said
    assert (
        "run run goes on with other processes, and its weights differ, in their last digits, from those" in caplog.text
    )
    assert caplog.text.rstrip().endswith(said)


def test_the_version_from_which_it_goes_on_is_saved_at_once(tmp_path):
    """Unless it is saved already: then the updates before it need not be made again."""
    run = open_run(tmp_path, iterations=6)
    started(run.store)
    for iteration in range(3):
        complete(run, iteration, checkpoint=iteration == 1)
    assert iterations_to_do(run) == [3, 4, 5]

    move(run.store, config(RANKS), cpu_threads=1)

    assert [version for version in range(1, 7) if checkpoint_due(run, version)] == [3, 6]
    assert iterations_to_do(run) == [2, 3, 4, 5]
    save(run.store, 3, universal=True)
    assert iterations_to_do(run) == [3, 4, 5]


@pytest.mark.parametrize(
    ("changed", "other_ranks"),
    [
        ({"ds.zero_stage"}, False),
        ({"vllm.num_engines"}, False),
        ({"critic.num_nodes"}, True),
        ({"model.num_nodes"}, True),
    ],
)
def test_threads_are_shared_out_again_where_the_number_of_ranks_changes(changed, other_ranks):
    assert ranks_change(changed) is other_ranks
