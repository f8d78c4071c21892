"""The models of a run are looked up once, when it first starts; what was found is recorded and used ever after."""

import pytest
from minimal_config import config
from task_samples import facts

from rlhf_core.cluster.placement import Node
from rlhf_core.errors import ConfigError
from rlhf_core.storage import CheckpointStore, RunStore
from tasks import opening
from tasks import run as run_module
from tasks.run import open_stored, opened


class Processes:
    """A session without processes."""

    def __init__(self, context, groups, lease):
        self.context, self.config, self.lease, self.discarded = context, context.config, lease, 0
        self.owner, self.restarts = lease.owner, []

    async def open(self, plan_steps):
        await plan_steps(facts(8))

    async def discard_actors(self):
        self.discarded += 1

    async def close(self, keep_actors):
        self.lease.release()


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    monkeypatch.setattr(opening, "connect", lambda address: [Node("here", 2, 0)])
    monkeypatch.setattr(run_module, "ActorGroups", lambda *arguments: None)
    monkeypatch.setattr(run_module, "RunSession", Processes)


@pytest.fixture
def source(tmp_path):
    """Another run, with a checkpoint."""
    run = RunStore("source", str(tmp_path))
    run.write_run({})
    save(CheckpointStore(run), 1, tmp_path)
    return CheckpointStore(run)


def save(checkpoints, version, tmp_path):
    staging = tmp_path / f"staging-{version}"
    (staging / "hf").mkdir(parents=True)
    (staging / "hf" / "config.json").write_text(f'{{"version": {version}}}')
    checkpoints.commit(version, {}, checkpoints.add_files(version, staging))


async def start(tmp_path, *overrides):
    async with opened(config(f"storage.root={tmp_path}", *overrides), "run") as run:
        return run


async def test_a_run_records_its_models_and_uses_them_again_when_its_source_went_on(source, tmp_path):
    names = ["actor.model_name_or_path=run:source", "algo.kl.init_coef=0.1", "ref.model_name_or_path=builtin:tiny"]
    first = await start(tmp_path, *names)
    save(source, 2, tmp_path)

    again = await start(tmp_path, *names)

    recorded = again.store.read_run()["models"]
    assert (recorded["policy"]["run"], recorded["policy"]["version"]) == ("source", 1)
    assert recorded["policy"]["url"] == source.url(1)
    assert recorded["reference"] == {"spec": "builtin:tiny"}
    assert again.session.context.models == first.session.context.models
    assert again.session.context.models["policy"].checkpoint.version == 1


async def test_a_model_that_there_is_not_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "connect", lambda address: pytest.fail("a cluster was asked for"))

    with pytest.raises(ConfigError, match="run:source@best: there is no run at"):
        await start(tmp_path, "actor.model_name_or_path=run:source@best")


async def test_workers_of_an_attempt_that_left_no_record_are_not_used_again(tmp_path):
    """They may hold another checkpoint than the name means now; once it is recorded, they hold the same."""
    first, again = await start(tmp_path), await start(tmp_path)

    assert (first.session.discarded, again.session.discarded) == (1, 0)


async def test_an_iteration_that_is_retried_goes_on_where_the_log_lies_now(tmp_path):
    await start(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")

    async with open_stored("run", str(tmp_path / "after"), {}) as run:
        assert run.store.read_run()["run_id"] == "run"
        assert run.session.context.store.root == run.store.root

    assert not (tmp_path / "before").exists()
