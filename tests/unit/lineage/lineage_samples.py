"""Two runs with logs: ``ppo`` was trained from version 2 of ``sft``; its reward file was mended before iteration 1."""

from rlhf_core.config import parse_config, parse_supervised_config
from rlhf_core.records import Part, Stage, StageManifest
from rlhf_core.storage import CheckpointStore, RunStore
from rlhf_core.storage.checkpoints import digest_of

OLD, NEW = {"rewards.py": "0" * 64}, {"rewards.py": "1" * 64, "helper.py": "2" * 64}
SFT = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "answers.jsonl"}, "train": {"seed": 7}}
PPO = {
    "actor": {"model_name_or_path": "run:sft@2"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "rewards.py:score"}]},
}


def write_runs(root):
    """Returns the log of ``ppo``."""
    sft, ppo = RunStore("sft", f"{root}/runs"), RunStore("ppo", f"{root}/runs")
    begin(sft, "sft", parse_supervised_config(SFT), 1, {"policy": {"spec": "builtin:tiny"}}, {})
    for iteration in range(3):
        update(sft, iteration)
        save(sft, root, iteration + 1)
    files = CheckpointStore(sft).files(2, "hf")
    pinned = {"spec": "run:sft@2", "run": "sft", "version": 2, "digest": digest_of(files)}
    url = CheckpointStore(sft).url(2)
    begin(ppo, "rlhf", parse_config(PPO), 2, {"policy": {**pinned, "url": url}}, OLD)
    for iteration, code in enumerate((OLD, NEW)):
        by_rewards(ppo, iteration, code)
        save(ppo, root, iteration + 1)
    return ppo


def begin(store, kind, config, hour, models, code):
    store.write_run(
        {
            "run_id": store.run_id,
            "kind": kind,
            "created_at": f"2026-01-01T{hour:02d}:00:00+00:00",
            "seed": config.train.seed,
            "config": config.model_dump(mode="json"),
            "plan": {"prompts": 8, "fingerprint": f"{store.run_id}-rows-are-hashed-here"},
            "code": {"revision": "abcdef" * 7, "dirty": True},
            "packages": {"torch": "2.13.0"},
            "models": models,
            "user_code": code,
        }
    )


def by_rewards(store, iteration, code):
    body = {"user_code": code}
    cursors = {"cursor_in": {"epoch": 0, "offset": iteration}, "cursor_out": {"epoch": 0, "offset": iteration + 1}}
    rollout = stage(store, iteration, Stage.ROLLOUT, {**body, **cursors, "drawn": 1}, part=True)
    reward = stage(store, iteration, Stage.REWARD, body, {"rollout": rollout.sha256})
    made_from = {"rollout": rollout.sha256, "reward": reward.sha256}
    experience = stage(store, iteration, Stage.EXPERIENCE, body, made_from)
    update(store, iteration, {"experience": experience.sha256}, body)


def update(store, iteration, inputs=None, body=None):
    after = {**(body or {}), "digest": f"{store.run_id}-weights-{iteration + 1}"}
    stage(store, iteration, Stage.UPDATE, after, inputs)


def stage(store, iteration, name, body, inputs=None, part=False):
    parts = [publish(store, iteration)] if part else []
    rows, tokens = sum(part.rows for part in parts), sum(part.tokens for part in parts)
    manifest = StageManifest(store.run_id, iteration, name, tuple(parts), rows, tokens, iteration, inputs or {}, body)
    return store.commit(manifest)


def publish(store, iteration):
    """Bytes that nobody here decodes."""
    data = f"shard of iteration {iteration}".encode()
    path = f"iterations/{iteration:08d}/rollout/part.arrow"
    store.objects.put(path, data)
    size, sha256 = store.objects.hashed(path)
    return Part(path, rows=4, tokens=32, bytes=size, sha256=sha256)


def save(store, root, version):
    folder = root / "saving" / store.run_id / str(version)
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.safetensors").write_bytes(f"{store.run_id} {version}".encode())
    checkpoints = CheckpointStore(store)
    body = {"version": version, "digest": f"{store.run_id}-weights-{version}"}
    checkpoints.commit(version, body, checkpoints.add_files(version, folder))
