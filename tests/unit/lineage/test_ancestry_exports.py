"""A run that trained on exported trajectories leads back to the run that spoke."""

import pytest
from saved_run import save_run

from rlhf_core.lineage import ancestry, draw
from rlhf_core.storage import RunStore


def trained_on(tmp_path, source_url, **changes):
    made = {"source_url": source_url, "iterations": [0, 3], "created_at": "2026-02-01T00:00:00+00:00", "altered": False}
    store = RunStore("sft", str(tmp_path))
    store.write_run(
        {
            "run_id": "sft",
            "kind": "sft",
            "created_at": "2026-03-01T00:00:00+00:00",
            "config": {"data": {"dataset": ["best.jsonl"]}},
            "plan": {"fingerprint": "a" * 64},
            "models": {"policy": {"spec": "builtin:tiny"}},
            "exports": {"best.jsonl": {**made, **changes}},
        }
    )
    return store


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "best.jsonl, from iterations 0..3 of run (trained by rewards on p.jsonl)"),
        ({"altered": True}, "best.jsonl, altered since, from iterations 0..3 of run (trained by rewards on p.jsonl)"),
        (
            {"created_at": "2025-12-31T00:00:00+00:00"},
            "best.jsonl, from iterations 0..3 of run (its run was made anew since)",
        ),
    ],
)
def test_the_way_back(tmp_path, changes, shown):
    source = save_run(tmp_path, [])

    lines = draw(ancestry(trained_on(tmp_path, source.url, **changes)))

    assert lines[1:3] == ["├─ policy: builtin:tiny", f"└─ trajectories: {shown}"]


def test_the_source_is_gone(tmp_path):
    lines = draw(ancestry(trained_on(tmp_path, f"file://{tmp_path}/gone")))

    assert lines[-1] == "└─ trajectories: best.jsonl, from iterations 0..3 of gone (there is no such run any more)"
