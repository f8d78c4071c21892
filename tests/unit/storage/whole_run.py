"""A run of two iterations with one of everything, and what the tests do to it."""

from storage_samples import experience, manifest, reward_row, trajectory

from rlhf_core.records import PromptCursor, Round, Stage
from rlhf_core.storage import CheckpointStore

VERSION = 2


def write_run(store, folder, iterations=VERSION):
    """Two iterations, the second filled in rounds; checkpoints of both versions; an evaluation, pointers, an end."""
    store.write_run({"run_id": store.run_id, "created_at": "2026"})
    for iteration in range(iterations):
        write_iteration(store, iteration)
        write_checkpoint(store, folder, iteration + 1)
    part = store.publish_eval_trajectories(iterations, [trajectory("held-out")])
    store.write_evaluation(iterations, {"version": iterations, "parts": [part_body(part)], "metrics": {}})
    store.set_pointer("latest", {"version": iterations})
    store.set_pointer("best", {"version": 1, "value": 1.0, "key": "k"})
    store.write_end(iterations)


def write_iteration(store, iteration):
    groups = [f"g{iteration}-{number}" for number in range(2)]
    rows = [store.publish_trajectories(iteration, [trajectory(group, iteration=iteration)]) for group in groups]
    body = write_round(store, iteration, groups, rows) if iteration else {}
    rollout = store.commit(of(store, rows, Stage.ROLLOUT, iteration, body=body))
    scored = [store.publish_rewards(iteration, [reward_row(group) for group in groups])]
    reward = store.commit(of(store, scored, Stage.REWARD, iteration, inputs={"rollout": rollout.sha256}))
    made_from = {"rollout": rollout.sha256, "reward": reward.sha256}
    made = [store.publish_experience(iteration, [experience(group) for group in groups])]
    trained = store.commit(of(store, made, Stage.EXPERIENCE, iteration, inputs=made_from))
    after = {"version": iteration + 1, "digest": f"d{iteration + 1}"}
    store.commit(of(store, [], Stage.UPDATE, iteration, inputs={"experience": trained.sha256}, body=after))


def write_round(store, iteration, groups, rows):
    """One group waits for a later iteration. Returns what the rollout says of it."""
    waits = store.publish_trajectories(iteration, [trajectory("waits", iteration=iteration)])
    scored = store.publish_rewards(iteration, [reward_row("waits")])
    places = {group: part.path for group, part in zip([*groups, "waits"], [*rows, waits], strict=True)}
    parts = (*rows, waits)
    played = Round(iteration, 0, 0, PromptCursor(), 3, {}, places, parts, {"parts": [part_body(scored)]})
    store.record_round(played)
    group = {"epoch": 0, "iteration": iteration, "round": 0}
    return {"selected": [{"group_id": name, **group} for name in groups], "buffered": [{"group_id": "waits", **group}]}


def write_checkpoint(store, folder, version):
    local = folder / f"v{version}"
    (local / "hf").mkdir(parents=True)
    for name in ("hf/model.safetensors", "hf/config.json", "state.pt"):
        (local / name).write_bytes(f"{name} of {version}".encode())
    checkpoints = CheckpointStore(store)
    checkpoints.commit(version, {"version": version, "digest": f"d{version}"}, checkpoints.add_files(version, local))


def of(store, parts, stage, iteration, **changes):
    return manifest(parts, stage, iteration, store.run_id, **changes)


def part_body(part):
    return {name: getattr(part, name) for name in ("path", "rows", "tokens", "bytes", "sha256")}


def flip(store, path, position=-9):
    """Alter one bit of an object."""
    data = bytearray(store.objects.read(path))
    data[position] ^= 1
    store.objects.put(path, bytes(data))
