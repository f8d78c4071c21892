"""Iterations done again from a run's log: where they begin, what is compared, what is said of a difference."""

from dataclasses import replace

import numpy as np
import pytest
from filling_rig import MIXED, Rig, Session, always, by_place
from replay_rig import record

from rlhf_core.cluster.replay import Replay, check_done
from rlhf_core.cluster.session import Updated
from rlhf_core.errors import ConfigError, CorruptShardError
from rlhf_core.records import Stage
from rlhf_core.storage import LeaseOwner, RunStore, World, acquire, record_world
from tasks.due import iterations_to_do
from tasks.plan import RunPlan
from tasks.reproduce import compare, different_experience, discard, environment, make_scratch

# Arrays of a shard are views of its bytes.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

FILTER = (
    "rollout.n_samples_per_prompt=2",
    "rollout.batch_size=2",
    "rollout.vllm_generate_batch_size=4",
    "algo.dynamic_filtering_enable=true",
)
SOLVED = (1.0, 1.0)
SCRIPT = by_place({1: SOLVED, 5: SOLVED}, MIXED)


@pytest.fixture
async def source(monkeypatch):
    """A filtered, over-sampled run of 9 prompts that has ended."""
    rig = record(Rig(monkeypatch, 9, SCRIPT, *FILTER))
    await rig.train(rig.start())
    return rig


class Again(Rig):
    """The scratch run, in one process."""

    run_id = "again"

    def __init__(self, monkeypatch, source, first, last, *, score=False, script=SCRIPT):
        self._monkeypatch, self._script = monkeypatch, script
        self.scratch = make_scratch(source.store, self.run_id, (first, last), None, score=score)
        self.config, self.prompts = self.scratch.config, source.prompts
        self.store = RunStore(self.run_id, source.store.root)
        body = self.store.read_run()
        self.plan, self.replay = RunPlan(**body["plan"]), Replay.from_json(body["replay"], source.store)
        self._act_as_ranks()

    async def redo(self):
        """What came out of each iteration, compared."""
        run = self.start()
        await self.train(run, len(self.scratch.iterations))
        return [await compare.fn(self.run_id, iteration) for iteration in self.scratch.iterations]


def verdicts(redone):
    return [(row["iteration"], row["rewards"], row["experience"], row["weights"]) for row in redone]


async def test_iterations_in_the_middle_are_done_again_and_are_the_same(monkeypatch, source):
    assert len(source.batches) >= 4

    again = Again(monkeypatch, source, 1, 3)
    left = iterations_to_do(again.start())
    redone = await again.redo()

    assert left[0] == 1
    assert verdicts(redone) == [(k, "recorded", "same", "same") for k in (1, 2, 3)]
    assert again.plan == source.plan
    assert again.batches[1:4] == source.batches[1:4]


async def test_scored_again_the_rewards_are_compared_too(monkeypatch, source):
    """Of the batches that were trained: they are not filtered again."""
    redone = await Again(monkeypatch, source, 1, 2, score=True).redo()

    assert verdicts(redone) == [(k, "same", "same", "same") for k in (1, 2)]


async def test_rewards_normalised_over_groups_that_are_not_scored_again_cannot_be_compared(monkeypatch):
    source = record(Rig(monkeypatch, 9, SCRIPT, *FILTER, "reward.normalize_enable=true"))
    await source.train(source.start(), 2)

    with pytest.raises(ConfigError, match="reproduce it with the recorded rewards"):
        make_scratch(source.store, "again", (0, 1), None, score=True)
    assert verdicts(await Again(monkeypatch, source, 1, 1).redo()) == [(1, "recorded", "same", "same")]


@pytest.mark.parametrize(
    ("overrides", "corrected"),
    [
        ((), True),
        (("algo.advantage.is_correction_enable=false", "train.allow_uncorrected=true"), False),
    ],
)
async def test_an_asynchronous_run_is_done_again_with_the_correction_that_it_had(monkeypatch, overrides, corrected):
    source = record(Rig(monkeypatch, 6, always(MIXED), *FILTER[:2], "train.async_enable=true", *overrides))
    await source.train(source.start())

    again = Again(monkeypatch, source, 1, 2)
    redone = await again.redo()

    assert (again.config.overlaps, again.config.corrects_mismatch) == (False, corrected)
    assert verdicts(redone) == [(k, "recorded", "same", "same") for k in (1, 2)]


async def test_a_reward_that_has_changed_is_named(monkeypatch, source):
    redone = await Again(monkeypatch, source, 0, 0, score=True, script=always((0.0, 0.5))).redo()

    assert verdicts(redone)[0][1:3] == ("different", "different")
    assert "2 of 4 rewards differ, such as of group 0000-00000000 sample 1: 1.0 then, 0.5 now" in redone[0]["notes"][0]
    assert "reward by up to 0.5" in redone[0]["notes"][1]


async def test_other_weights_are_named(monkeypatch, source):
    async def update(self, iteration, experience, kl_coef):
        return Updated({}, {"digest": f"other-{iteration}"}, iteration + 1)

    again = Again(monkeypatch, source, 1, 1)
    monkeypatch.setattr(Session, "update", update)

    redone = await again.redo()

    assert verdicts(redone) == [(1, "recorded", "same", "different")]
    assert redone[0]["notes"] == ["weights: policy digest-1 then, other-1 now"]


async def test_the_scratch_run_goes_and_the_source_is_as_it_was(monkeypatch, source):
    before = {path: source.store.objects.read(path) for path in source.store.objects.list()}
    again = Again(monkeypatch, source, 2, 2)
    await again.redo()

    discard(again.scratch)

    assert again.store.objects.list() == []
    assert {path: source.store.objects.read(path) for path in source.store.objects.list()} == before


async def test_a_half_made_scratch_run_is_made_anew_and_nothing_else_is_removed(monkeypatch, source):
    Again(monkeypatch, source, 1, 1)
    Again(monkeypatch, source, 2, 2)

    with pytest.raises(ConfigError, match="is no scratch run: choose another run_id"):
        make_scratch(source.store, "run", (1, 1), None, score=False)

    assert source.store.read_run() is not None


async def test_a_scratch_run_under_way_is_not_made_anew(source):
    scratch = make_scratch(source.store, "again", (1, 1), None, score=False)
    lease = acquire(scratch.store, LeaseOwner("elsewhere", "m", 1, 0.0, "other"), 60)

    for again in (lambda: make_scratch(source.store, "again", (1, 1), None, score=False), lambda: discard(scratch)):
        with pytest.raises(ConfigError, match="again is under way in process 1 on elsewhere"):
            again()

    lease.renew()


async def test_of_a_source_that_is_damaged_nothing_is_left_half_made(source):
    (path,) = source.store.objects.list("iterations/00000000/experience")
    source.store.objects.put(path, b"other bytes")

    with pytest.raises(CorruptShardError, match=path.rpartition("/")[2]):
        make_scratch(source.store, "again", (1, 1), None, score=False)

    assert RunStore("again", source.store.root).objects.list() == []


async def test_iterations_that_were_not_done_are_refused(source, monkeypatch):
    with pytest.raises(ConfigError, match=r"iterations 2\.\.99 .* its log has updates 0\.\."):
        check_done(source.store, 2, 99)
    with pytest.raises(ConfigError, match="no update yet"):
        check_done(Rig(monkeypatch, 4, always(MIXED)).store, 0, 0)


async def test_a_difference_in_experience_says_which_column_and_by_how_much(source):
    manifest = source.store.stage(0, Stage.EXPERIENCE)[0]
    rows = source.store.read_experience(manifest.parts)
    moved = [replace(rows[0], advantages=rows[0].advantages + np.float32(0.25)), *rows[1:]]

    assert different_experience(rows, moved) == "experience: advantages by up to 0.25"
    assert "4 rows then, 3 now" in different_experience(rows, rows[1:])
    assert "order or encoding" in different_experience(rows, rows)


def test_what_has_changed_since_is_listed(tmp_path):
    store = RunStore("run", str(tmp_path))
    store.write_run({"code": {"revision": "old"}, "packages": {"torch": "1.0"}})

    changed = environment(store)

    assert any(line.startswith("code.revision: 'old' then, ") for line in changed)
    assert any(line.startswith("packages.torch: '1.0' then, ") for line in changed)
    assert not any(line.startswith("machine") for line in changed)  # not recorded then


async def test_a_run_that_changed_its_processes_is_reproduced_with_those_that_made_the_iterations(source):
    record_world(source.store, World(2, {"ds.zero_stage": 1}, 3))

    scratch = make_scratch(source.store, "again", (2, 3), None, score=False)

    assert (scratch.config.ds.zero_stage, scratch.config.run.cpu_threads) == (1, 3)
    with pytest.raises(ConfigError, match=r"from iteration 2: reproduce 0\.\.1 and 2\.\.3 one after the other"):
        make_scratch(source.store, "again", (0, 3), None, score=False)
