"""``rlhf lineage``, ``rlhf lineage verify`` and ``rlhf gc``, as they are typed."""

import json

import pytest
from typer.testing import CliRunner

from rlhf_cli import main as cli
from rlhf_core.errors import ConfigError, LeaseError
from rlhf_core.records import Part, Stage, StageManifest
from rlhf_core.storage import LeaseOwner, RunStore, acquire

LEFT = f"iterations/00000000/rollout/000001r-5t-4b-{'0' * 64}.arrow"
BODY = {
    "kind": "sft",
    "created_at": "2026",
    "plan": {"fingerprint": "f"},
    "config": {"data": {"dataset": ["rows"]}},
    "models": {"policy": {"spec": "builtin:tiny"}},
}


@pytest.fixture(params=["first", "verify"])
def store(request, tmp_path):
    """One iteration with one part, and a part that an attempt left; one run is called like a command."""
    run = RunStore(request.param, str(tmp_path))
    run.write_run({**BODY, "run_id": request.param})
    path = "iterations/00000000/rollout/part.arrow"
    run.objects.put(path, b"a shard")
    size, sha256 = run.objects.hashed(path)
    part = Part(path, 1, 5, size, sha256)
    run.commit(StageManifest(run.run_id, 0, Stage.ROLLOUT, (part,), 1, 5, 0))
    run.commit(StageManifest(run.run_id, 0, Stage.UPDATE, (), 0, 0, 0, body={"digest": "d"}))
    run.objects.put(LEFT, b"left")
    return run


def rlhf(*arguments):
    return CliRunner().invoke(cli.app, [*arguments])


def test_the_way_is_shown_however_it_is_asked_for(store):
    here = ("--root", store.root)
    by_name = rlhf("lineage", "show", store.run_id, *here)

    ways = [
        rlhf("lineage", store.url),
        rlhf("lineage", *here, store.run_id + "@1"),
        rlhf("lineage", f"run:{store.run_id}", *here),
    ]

    assert by_name.exit_code == 0
    assert by_name.stdout.splitlines()[0] == f"{store.run_id}: SFT on rows (fingerprint f)"
    assert {done.stdout for done in ways} == {by_name.stdout}
    assert "      rollout     sha256" in by_name.stdout


def test_as_json_and_as_a_picture(store, tmp_path):
    done = rlhf("lineage", "--json", store.url, "--graph", str(tmp_path / "way.dot"))

    told = json.loads(done.stdout)
    assert (told["run_id"], told["version"]) == (store.run_id, 1)
    assert told["runs"][store.url]["iterations"][0]["stages"][0]["parts"][0]["path"].endswith("part.arrow")
    assert (tmp_path / "way.dot").read_text().startswith("digraph")


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(tmp_path):
    done = rlhf("lineage", "no-run", "--graph", str(tmp_path / "way.jpg"))

    assert isinstance(done.exception, ConfigError)
    assert "way.jpg" in str(done.exception)


def test_a_whole_run_is_verified(store):
    done = rlhf("lineage", "verify", store.run_id, "--root", store.root, "--parents")

    assert (done.exit_code, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"whole: {store.url} (3 documents, 1 other object, ")
    assert second == "besides, 1 object that no document names: see rlhf gc"


def test_damage_is_named_and_the_exit_code_says_so(store):
    path = "iterations/00000000/rollout/part.arrow"
    store.objects.put(path, b"A shard")

    shown, structured = rlhf("lineage", "verify", store.url), rlhf("lineage", "verify", store.url + "@1", "--json")

    assert (shown.exit_code, structured.exit_code) == (1, 1)
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"altered: {path}: its sha256 is ")
    assert lines[0].endswith("; iterations/00000000/rollout.json names it")
    assert lines[1].startswith(f"1 fault: {store.url}")
    told = json.loads(structured.stdout)
    assert (told["ok"], told["runs"][0]["ok"], told["runs"][0]["version"]) == (False, False, 1)
    assert [fault["path"] for fault in told["runs"][0]["faults"]] == [path]


def test_garbage_is_listed_and_then_removed(store):
    listed, still = rlhf("gc", store.url), store.objects.exists(LEFT)
    removed, gone = rlhf("gc", store.url, "--yes", "--json"), not store.objects.exists(LEFT)
    again = rlhf("gc", store.url)

    assert (listed.exit_code, removed.exit_code, still, gone) == (0, 0, True, True)
    assert listed.stdout.splitlines() == [
        f"       4 B  {LEFT}  (stage rollout of iteration 0 is complete without it)",
        f"garbage: 1 object, 4 B, of {store.url}",
        "remove it with --yes",
    ]
    told = json.loads(removed.stdout)
    assert (told["removed"], [piece["path"] for piece in told["garbage"]]) == (True, [LEFT])
    assert again.stdout == f"garbage: 0 objects, 0 B, of {store.url}\n"


def test_a_run_that_is_being_written_is_listed_and_left_alone(store):
    acquire(store, LeaseOwner.of_this_process(), 60)

    listed, refused = rlhf("gc", store.url), rlhf("gc", store.url, "--yes")

    assert LEFT in listed.stdout
    assert isinstance(refused.exception, LeaseError)
    assert store.objects.exists(LEFT)
