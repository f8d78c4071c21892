"""Models that other runs made: what a name means when a run starts, and the files a worker gets.

::

    run "source"   v1   v2 (best)   v3     each with hf/config.json, hf/weights and state/optimizer
"""

import json
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.config import parse_config
from rlhf_core.config.model import StorageConfig
from rlhf_core.config.supervised import SupervisedConfig
from rlhf_core.data import models_of, pin, pin_models, resolve_model, supervised_models_of
from rlhf_core.data.model_reference import fetch
from rlhf_core.errors import ConfigError, CorruptShardError
from rlhf_core.storage import CheckpointStore, ObjectStore, RunStore

MINIMAL = {
    "actor": {"model_name_or_path": "run:source@best"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
}


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=["file", "memory"])
def storage(request, tmp_path):
    """A store of each kind; only the first is a folder of this machine."""
    root = str(tmp_path / "runs") if request.param == "file" else f"memory://{tmp_path.name}"
    return StorageConfig(root=root)


@pytest.fixture
def local(tmp_path):
    return StorageConfig(root=str(tmp_path / "runs"))


def save(checkpoints, version, tmp_path, hf=True):
    folder = tmp_path / f"staging-{checkpoints.run_store.run_id}-{version}"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "optimizer").write_bytes(b"o" * 100)
    if hf:
        (folder / "hf").mkdir()
        (folder / "hf" / "config.json").write_text("{}")
        (folder / "hf" / "weights").write_text(f"weights of {version}")
    checkpoints.commit(version, {"digest": f"d{version}"}, checkpoints.add_files(version, folder))
    shutil.rmtree(folder)


def make_source(storage, tmp_path, run_id="source", versions=(1, 2, 3), best=2):
    run = RunStore(run_id, storage.root)
    run.write_run({"run_id": run_id})
    for version in versions:
        save(CheckpointStore(run), version, tmp_path)
    if best:
        run.set_pointer("best", {"version": best, "value": 0.8, "key": "eval/score_mean"})
    return CheckpointStore(run)


def weights(folder):
    return (folder / "weights").read_text()


# --- pinning


@pytest.mark.parametrize(
    ("name", "version"),
    [("run:source", 3), ("run:source@latest", 3), ("run:source@best", 2), ("run:source@1", 1)],
)
def test_a_name_means_one_checkpoint(storage, tmp_path, name, version):
    source = make_source(storage, tmp_path)

    body = pin(name, storage).to_json()

    assert (body["spec"], body["run"], body["version"]) == (name, "source", version)
    assert body["url"] == source.run_store.url_of(f"checkpoints/v0000000{version}")
    assert len(body["digest"]) == 64


def test_a_run_anywhere_is_named_by_its_url(tmp_path, local):
    elsewhere = StorageConfig(root=f"memory://{tmp_path.name}-elsewhere")
    make_source(elsewhere, tmp_path)

    pinned = pin(f"run:{elsewhere.root}/source@best", local)

    assert pinned.checkpoint.url == f"{elsewhere.root}/source/checkpoints/v00000002"


@pytest.mark.parametrize("name", ["builtin:tiny", "org/model", "./folder"])
def test_other_names_mean_what_they_say(local, name):
    assert pin(name, local).to_json() == {"spec": name}
    assert pin(name, local).origin == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run:nobody", r"there is no run at .*/nobody: check its id and storage.root"),
        (
            "run:source@7",
            r"no complete checkpoint of version 7; it has 1, 2, 3 \(see its ckpt.save_steps, ckpt.max_num",
        ),
        ("run:empty", r"empty has no complete checkpoint yet"),
        ("run:empty@best", r"empty has no best checkpoint: it has no ckpt.best_metric_key"),
        ("run:stateonly", r"v00000001 holds no exported model \(that run had ckpt.save_hf=false\)"),
        ("run:source@first", r"names no run's model"),
    ],
)
def test_a_name_that_means_nothing_is_refused(storage, tmp_path, name, message):
    make_source(storage, tmp_path)
    make_source(storage, tmp_path, "empty", versions=(), best=None)
    save(make_source(storage, tmp_path, "stateonly", versions=(), best=None), 1, tmp_path, hf=False)

    with pytest.raises(ConfigError, match=message):
        pin(name, storage)


def test_a_version_that_was_rotated_away_is_refused(storage, tmp_path):
    make_source(storage, tmp_path).delete(1)

    with pytest.raises(ConfigError, match=r"no complete checkpoint of version 1; it has 2, 3"):
        pin("run:source@1", storage)


def test_the_newest_is_the_newest_that_is_whole(storage, tmp_path):
    make_source(storage, tmp_path).run_store.objects.delete("checkpoints/v00000003/hf/weights")

    assert pin("run:source", storage).checkpoint.version == 2


def test_a_resumed_run_uses_what_it_started_with(storage, tmp_path):
    source = make_source(storage, tmp_path)
    roles = {"policy": "run:source", "reference": "run:source@best", "reward": "org/rm"}
    first = pin_models(roles, storage)
    recorded = json.loads(json.dumps({role: model.to_json() for role, model in first.items()}))
    save(source, 4, tmp_path)
    source.run_store.set_pointer("best", {"version": 4, "value": 0.9, "key": "eval/score_mean"})

    resumed = pin_models(roles, storage, recorded)

    assert resumed == first
    assert pin_models(roles, storage)["policy"].checkpoint.version == 4


def test_a_resumed_run_finds_its_models_where_storage_root_was_moved_to(tmp_path, local):
    make_source(local, tmp_path)
    recorded = {"policy": pin("run:source", local).to_json()}
    (tmp_path / "runs").rename(tmp_path / "moved")

    moved = pin_models({"policy": "run:source"}, StorageConfig(root=str(tmp_path / "moved")), recorded)

    assert weights(fetch(moved["policy"].checkpoint, tmp_path / "cache")) == "weights of 3"


def test_a_name_of_two_roles_is_looked_up_once(tmp_path, local, monkeypatch):
    """The source run goes on between the two."""
    make_source(local, tmp_path)
    answers = iter([(1, {}), (2, {})])
    monkeypatch.setattr(CheckpointStore, "newest", lambda checkpoints: next(answers))

    models = pin_models({"policy": "run:source", "reference": "run:source"}, local)

    assert models["policy"] == models["reference"]


def test_the_models_of_a_run_by_rewards():
    """The reference and the critic start where they are told to, or from what the run has anyway."""

    def roles(*overrides):
        return models_of(parse_config(MINIMAL, overrides))

    policy = "run:source@best"
    assert roles() == {"policy": policy}
    assert roles("algo.kl.init_coef=0.1") == {"policy": policy, "reference": policy}
    assert roles("algo.kl.init_coef=0.1", "ref.model_name_or_path=base") == {"policy": policy, "reference": "base"}


def test_the_models_of_a_supervised_run():
    config = SupervisedConfig(model={"model_name_or_path": "base"}, data={"dataset": "rows.jsonl"})

    assert supervised_models_of(config, "sft") == supervised_models_of(config, "reward_model") == {"policy": "base"}
    assert supervised_models_of(config, "dpo") == {"policy": "base", "reference": "base"}


# --- fetching


def test_a_worker_gets_the_exported_model_and_nothing_else(storage, tmp_path):
    make_source(storage, tmp_path)
    pinned = pickle.loads(pickle.dumps(pin("run:source@best", storage)))

    folder = fetch(pinned.checkpoint, tmp_path / "cache")

    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "weights"]
    assert weights(folder) == "weights of 2"
    assert folder.parent == tmp_path / "cache"


def test_resolving_a_pinned_model_gives_a_folder_and_any_other_its_name(storage, tmp_path, monkeypatch):
    make_source(storage, tmp_path)

    folder = resolve_model(pin("run:source@1", storage), tmp_path / "cache")

    assert weights(Path(folder)) == "weights of 1"
    assert resolve_model(pin("org/model", storage)) == "org/model"


def test_a_worker_never_decides_what_the_newest_is():
    with pytest.raises(ConfigError, match=r"'run:source@best' means another checkpoint .*: pin\(\) it"):
        resolve_model("run:source@best")


def test_a_second_fetch_reads_nothing(storage, tmp_path, monkeypatch):
    make_source(storage, tmp_path)
    pinned = pin("run:source", storage).checkpoint
    fetch(pinned, tmp_path / "cache")
    monkeypatch.setattr(ObjectStore, "read", unreachable)
    monkeypatch.setattr(ObjectStore, "get_file", unreachable)

    assert weights(fetch(pinned, tmp_path / "cache")) == "weights of 3"


def unreachable(*arguments, **options):
    raise AssertionError("the store was asked")


def test_a_fetched_model_outlives_its_source_and_costs_no_space_on_the_same_disk(tmp_path, local):
    source = make_source(local, tmp_path)
    pinned = pin("run:source@1", local).checkpoint
    folder = fetch(pinned, tmp_path / "cache")
    assert (folder / "weights").samefile(tmp_path / "runs/source/checkpoints/v00000001/hf/weights")

    source.delete(1)

    assert weights(fetch(pinned, tmp_path / "cache")) == "weights of 1"


def test_a_pinned_version_that_was_rotated_away_meanwhile_is_named(storage, tmp_path):
    source = make_source(storage, tmp_path)
    pinned = pin("run:source@1", storage).checkpoint
    source.delete(1)

    with pytest.raises(ConfigError, match=r"v00000001, which this run uses, is gone: it was rotated away"):
        fetch(pinned, tmp_path / "cache")


def test_a_run_that_was_made_anew_under_the_same_id_is_not_taken_for_the_old_one(storage, tmp_path):
    make_source(storage, tmp_path)
    pinned = replace(pin("run:source@1", storage).checkpoint, digest="0" * 64)

    with pytest.raises(ConfigError, match="holds another model than when this run started"):
        fetch(pinned, tmp_path / "cache")


def test_a_damaged_file_is_named_and_leaves_nothing(storage, tmp_path):
    source = make_source(storage, tmp_path)
    pinned = pin("run:source@1", storage).checkpoint
    source.run_store.objects.put("checkpoints/v00000001/hf/weights", b"weights of 9")

    with pytest.raises(CorruptShardError, match="hf/weights is damaged"):
        fetch(pinned, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_threads_that_fetch_at_once_get_one_whole_model_from_one_download(storage, tmp_path, monkeypatch):
    make_source(storage, tmp_path)
    pinned, downloads, real = pin("run:source", storage).checkpoint, [], CheckpointStore.download

    def download(checkpoints, *arguments, **options):
        downloads.append(arguments)
        real(checkpoints, *arguments, **options)

    monkeypatch.setattr(CheckpointStore, "download", download)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: fetch(pinned, tmp_path / "cache"), range(8)))

    assert {weights(folder) for folder in folders} == {"weights of 3"}
    assert len(downloads) == 1


def fetch_and_tell(pinned, cache, barrier, answers):
    barrier.wait(30)
    answers.put(weights(fetch(pinned, cache)))


def test_processes_that_fetch_at_once_get_one_whole_model(local, tmp_path):
    make_source(local, tmp_path)
    pinned, fork = pin("run:source", local).checkpoint, multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(4), fork.Queue()

    workers = [
        fork.Process(target=fetch_and_tell, args=(pinned, tmp_path / "cache", barrier, answers)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join(30)

    assert found == ["weights of 3"] * 4
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [
        f"run-source-v00000003-{pinned.digest[:16]}"
    ]


def test_what_a_killed_fetch_left_is_replaced(local, tmp_path):
    make_source(local, tmp_path)
    pinned = pin("run:source", local).checkpoint
    child = os.fork()
    if child == 0:
        ObjectStore.get_file = lambda *arguments, **options: os._exit(9)
        fetch(pinned, tmp_path / "cache")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    left = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]

    folder = fetch(pinned, tmp_path / "cache")

    assert (os.waitstatus_to_exitcode(status), len(left)) == (9, 1)
    assert weights(folder) == "weights of 3"
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]
