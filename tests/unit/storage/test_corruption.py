"""Nothing is read that was not written: each damage is found, and its object named."""

import dataclasses
import logging
import re

import pytest
from storage_samples import experience, manifest, reward_row, trajectory

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore


@pytest.fixture(params=["trajectories", "rewards", "experience"])
def published(request, run_store):
    """A part of each kind, and how it is read."""
    rows = {"trajectories": trajectory(), "rewards": reward_row(), "experience": experience()}[request.param]
    part = getattr(run_store, f"publish_{request.param}")(1, [rows])
    return run_store, part, getattr(run_store, f"read_{request.param}")


def damage(run_store, path, change):
    run_store.objects.put(path, change(run_store.objects.read(path)))


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_a_flipped_byte_anywhere_is_found(published):
    run_store, part, read = published
    whole = run_store.objects.read(part.path)

    for position in range(0, len(whole), len(whole) // 10):
        run_store.objects.put(part.path, flipped(whole, position))
        with pytest.raises(
            CorruptShardError, match=rf"{re.escape(part.path)} is damaged: .* recorded was {part.sha256}"
        ):
            read([part])


def test_a_truncated_part_is_found(published):
    run_store, part, read = published
    damage(run_store, part.path, lambda data: data[:-1])

    with pytest.raises(CorruptShardError, match=rf"has {part.bytes - 1} bytes, recorded were {part.bytes}"):
        read([part])


def test_a_missing_part_is_found(published):
    run_store, part, read = published
    run_store.objects.delete(part.path)

    with pytest.raises(CorruptShardError, match=rf"{re.escape(part.path)} is missing"):
        read([part])


def test_another_number_of_rows_is_found(published):
    _, part, read = published

    with pytest.raises(CorruptShardError, match="has 1 rows, recorded were 2"):
        read([dataclasses.replace(part, rows=2)])


def test_a_part_of_another_table_is_found(run_store):
    part = run_store.publish_rewards(1, [reward_row()])

    with pytest.raises(
        CorruptShardError, match=rf"{re.escape(part.path)}: expected a trajectory shard, found 'reward'"
    ):
        run_store.read_trajectories([part])


def test_one_damaged_part_of_several_gives_no_rows(run_store):
    parts = [run_store.publish_trajectories(1, [trajectory(sample=i)]) for i in range(3)]
    damage(run_store, parts[2].path, lambda data: flipped(data, 200))

    with pytest.raises(CorruptShardError):
        run_store.read_trajectories(parts)


def test_a_damaged_part_of_a_dead_attempt_is_left_out_with_a_warning(run_store, caplog):
    whole = run_store.publish_trajectories(1, [trajectory()])
    torn = run_store.publish_trajectories(1, [trajectory("g1")])
    damage(run_store, torn.path, lambda data: flipped(data, 200))
    run_store.objects.put("iterations/00000001/rollout/notes.txt", b"x")

    with caplog.at_level(logging.WARNING):
        found = run_store.published_parts(1, Stage.ROLLOUT)

    assert found == [whole]
    assert torn.path in caplog.text
    assert "notes.txt is no part" in caplog.text


def test_publishing_again_heals_a_damaged_part(run_store):
    part = run_store.publish_trajectories(1, [trajectory()])
    damage(run_store, part.path, lambda data: flipped(data, 200))

    run_store.publish_trajectories(1, [trajectory()])

    assert len(run_store.read_trajectories([part])) == 1


@pytest.mark.parametrize(
    ("run_id", "iteration", "stage"),
    [("other", 1, Stage.UPDATE), ("run", 2, Stage.UPDATE), ("run", 1, Stage.ROLLOUT)],
    ids=["of another run", "of another iteration", "of another stage"],
)
def test_a_foreign_manifest_is_refused(tmp_path, run_id, iteration, stage):
    run_store, source = RunStore("run", str(tmp_path)), RunStore(run_id, str(tmp_path))
    ref = source.commit(manifest([], stage, iteration, run_id))
    run_store.objects.put("iterations/00000001/update.json", source.objects.read(ref.path))

    with pytest.raises(
        CorruptShardError, match=rf"update\.json is the manifest of run '{run_id}' iteration {iteration}"
    ):
        run_store.stage(1, Stage.UPDATE)


def test_a_flipped_byte_in_a_manifest_is_found(run_store):
    ref = run_store.commit(manifest([], Stage.UPDATE))
    whole = run_store.objects.read(ref.path)

    for position in range(0, len(whole), 17):
        run_store.objects.put(ref.path, flipped(whole, position))
        with pytest.raises(CorruptShardError, match=r"update\.json is"):
            run_store.stage(1, Stage.UPDATE)


def test_a_reference_to_another_manifest_is_refused(run_store):
    ref = run_store.commit(manifest([], Stage.UPDATE))

    with pytest.raises(CorruptShardError, match="is not the manifest referred to"):
        run_store.read_manifest(dataclasses.replace(ref, sha256="0" * 64))


def test_a_reference_to_a_missing_manifest_is_refused(run_store):
    ref = run_store.commit(manifest([], Stage.UPDATE))
    run_store.objects.delete(ref.path)

    with pytest.raises(CorruptShardError, match=r"update\.json is missing"):
        run_store.read_manifest(ref)


def test_a_manifest_of_another_run_is_not_committed(run_store):
    with pytest.raises(StorageError, match="a manifest of run 'other' cannot be committed here"):
        run_store.commit(manifest([], Stage.UPDATE, run_id="other"))


def test_a_manifest_that_names_an_absent_part_is_not_committed(run_store):
    part = run_store.publish_trajectories(1, [trajectory()])
    run_store.objects.delete(part.path)

    with pytest.raises(StorageError, match="is not there whole"):
        run_store.commit(manifest([part]))
    assert run_store.stage(1, Stage.ROLLOUT) is None


def test_a_manifest_that_names_an_absent_part_of_an_earlier_iteration_is_not_committed(run_store):
    part = run_store.publish_trajectories(1, [trajectory()])
    run_store.objects.delete(part.path)

    with pytest.raises(StorageError, match="is not there whole"):
        run_store.commit(manifest([part], iteration=2))


def test_a_manifest_names_no_part_of_another_stage_or_of_the_future(run_store):
    part = run_store.publish_trajectories(1, [trajectory()])

    for elsewhere in (manifest([part], iteration=0), manifest([part], Stage.REWARD)):
        with pytest.raises(StorageError, match="names parts of its own stage, of its or an earlier iteration"):
            run_store.commit(elsewhere)


def test_case_126_a_part_is_not_counted_twice(run_store):
    part = run_store.publish_trajectories(1, [trajectory()])

    with pytest.raises(StorageError, match="a part is named twice"):
        run_store.commit(manifest([part, part]))
