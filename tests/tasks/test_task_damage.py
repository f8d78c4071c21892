"""A run that meets damage in its log stops with the object's name, and trains nothing on it."""

from types import SimpleNamespace

import pytest
from filling_rig import MIXED, Rig, Session, always

from rlhf_core.cluster.policy_worker import PolicyWorker
from rlhf_core.errors import CorruptShardError
from rlhf_core.records import Stage, StageManifest
from rlhf_core.storage import RunStore
from rlhf_core.storage.audit.verification import verify
from tasks.advantage import advantage
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.update import update

# Arrays of a shard are views of its bytes.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

STAGES = {Stage.ROLLOUT: rollout, Stage.REWARD: reward, Stage.EXPERIENCE: advantage, Stage.UPDATE: update}
READ_BY = [(Stage.ROLLOUT, Stage.REWARD), (Stage.REWARD, Stage.EXPERIENCE), (Stage.EXPERIENCE, Stage.UPDATE)]


class Trainer:
    """Writes down what it is asked to train on."""

    version = 0

    def __init__(self):
        self.trained = []

    def check_loaded(self):
        pass

    def update(self, rows, iteration, kl_coef, frozen):
        self.trained += rows
        return SimpleNamespace(metrics=dict, advantage_metrics=dict)


class Training(Session):
    """With a real rank's reading before the training."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trainer = Trainer()
        self._policy = PolicyWorker.__new__(PolicyWorker)
        self._policy._store, self._policy._config, self._policy._trainer = arguments[0], arguments[1], self.trainer

    async def update(self, iteration, experience, kl_coef):
        self._policy.update(iteration, experience, kl_coef)
        return await super().update(iteration, experience, kl_coef)


@pytest.fixture
def rig(monkeypatch):
    rig = Rig(monkeypatch, 4, always(MIXED), "rollout.n_samples_per_prompt=2", "rollout.batch_size=2")
    rig.store.write_run({"run_id": "run"})
    return rig


async def up_to(rig, last):
    """The run, all stages of iteration 0 up to ``last`` done."""
    run = rig.start()
    run.session = Training(rig.store, rig.config, rig.prompts, always(MIXED))
    for stage, task in STAGES.items():
        await task.fn("run", 0)
        if stage is last:
            return run
    raise AssertionError(last)


def flip(store, path):
    data = bytearray(store.objects.read(path))
    data[len(data) // 2] ^= 1
    store.objects.put(path, bytes(data))


async def refuses(run, stage, message):
    """The stage names the damage, is not done, and nothing was trained; so does the verification."""
    with pytest.raises(CorruptShardError, match=message):
        await STAGES[stage].fn("run", 0)

    assert run.store.stage(0, stage) is None
    assert run.session.trainer.trained == []
    assert run.store.newest_update() is None


async def test_whole_rows_are_trained(rig):
    run = await up_to(rig, Stage.UPDATE)

    assert len(run.session.trainer.trained) == 4
    assert verify(run.store).ok


@pytest.mark.parametrize(("damaged", "read_by"), READ_BY)
async def test_a_flipped_byte_in_a_shard(rig, damaged, read_by):
    run = await up_to(rig, damaged)
    path = run.store.stage(0, damaged)[0].parts[0].path
    flip(run.store, path)

    await refuses(run, read_by, f"{path} is damaged")

    assert [fault.path for fault in verify(run.store).faults] == [path]


@pytest.mark.parametrize(("damaged", "read_by"), READ_BY)
async def test_a_missing_part(rig, damaged, read_by):
    run = await up_to(rig, damaged)
    path = run.store.stage(0, damaged)[0].parts[0].path
    run.store.objects.delete(path)

    await refuses(run, read_by, f"{path} is missing")

    assert [(fault.path, fault.kind) for fault in verify(run.store).faults] == [(path, "missing")]


@pytest.mark.parametrize(("damaged", "read_by"), READ_BY)
async def test_a_manifest_of_another_run(rig, damaged, read_by):
    run = await up_to(rig, damaged)
    path = f"iterations/00000000/{damaged}.json"
    other = RunStore("other", run.store.root)
    other.commit(StageManifest("other", 0, damaged, (), 0, 0, 0))
    run.store.objects.put(path, other.objects.read(path))

    await refuses(run, read_by, rf"{path} is the manifest of run 'other'")

    assert (path, "foreign") in {(fault.path, fault.kind) for fault in verify(run.store).faults}
