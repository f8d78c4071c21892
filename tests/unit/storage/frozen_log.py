"""A small run as an earlier version of this software wrote it, kept byte for byte in ``tests/data``.

``python tests/unit/storage/frozen_log.py`` writes that of the present schema versions, once: after a schema has changed. What
is there already is never written again.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from storage_samples import experience, manifest, trajectory
from whole_run import write_run

from rlhf_core.records import (
    ActionRange,
    ImageRef,
    RewardResult,
    RewardStatus,
    SamplingParams,
    Stage,
    StepReward,
    StopReason,
    Trajectory,
    VersionSpan,
)
from rlhf_core.storage import RewardRow, RunStore, documents
from rlhf_core.storage.shards import schema

DATA = Path(__file__).parents[2] / "data"
ITERATION = 7  # of the rows below; those of whole_run are beside them
TRAJECTORIES = [
    trajectory(iteration=ITERATION),
    trajectory(
        "g1",
        iteration=ITERATION,
        round=3,
        segment_index=1,
        label={"answer": ["ä", 1, 2.5, None]},
        messages=[{"role": "user", "content": "漢字 🙂"}],
        prompt="漢字 🙂\n",
        action_ranges=(ActionRange(1, 2), ActionRange(3, 5)),
        version_spans=(VersionSpan(1, 2, 2**40), VersionSpan(3, 5, 8)),
        step_rewards=(StepReward(1, 0.1), StepReward(4, -2.0)),
        reward=0.1,
        score=1.0,
        reward_status=RewardStatus.OK,
        images=(ImageRef("ab" * 32, "images/ab.png", 1, 3),),
        sampling=SamplingParams(8, 0.7, 0.9, 50, 1, ("\n", "</s>"), True, None),
        metrics={"turns": 2.0},
        transcript=" 2<|end|>\nwrong\n 3",
        started_at=1764438000.125,
        seconds=1.5,
    ),
    trajectory(
        "g2",
        iteration=ITERATION,
        tokens=(),
        start=0,
        action_ranges=(),
        version_spans=(),
        stop_reason=StopReason.ERROR,
        error="boom",
        label=None,
        answer="",
    ),
]
REWARDS = [
    RewardRow("g0", 0, RewardResult(RewardStatus.OK, -1.0, 0.0, {"exact": 0.0}, None, 0.2)),
    RewardRow("g1", 0, RewardResult(RewardStatus.TIMED_OUT, seconds=5.0)),
    RewardRow("g2", 0, RewardResult(RewardStatus.SKIPPED, error="boom")),
]
EXPERIENCE = [
    experience(),
    experience(
        "g1",
        1,
        ref_logprobs=np.full(4, -0.25, np.float32),
        values=np.ones(4, np.float32),
        constrained=True,
        images=(ImageRef("ab" * 32, "images/ab.png", 0, 2),),
    ),
]


def without_images_in_place(row):
    """What version 1 of the shards kept of a row: which images its trajectory shows, not where."""
    kept = (ImageRef(*image[:2], 0, 0) for image in row.images)
    if not isinstance(row, Trajectory):
        return replace(row, images=())
    return replace(row, images=tuple(kept), transcript="")


def folder() -> Path:
    """Where the log of the present schema versions lies."""
    return DATA / f"log-shards{schema.SCHEMA_VERSION}-documents{documents.SCHEMA_VERSION}"


def write(root: Path) -> None:
    """Write the run ``run`` below ``root``."""
    store = RunStore("run", str(root))
    with tempfile.TemporaryDirectory() as staging:
        write_run(store, Path(staging))
    about = {"iteration": ITERATION, "body": {"ledger": {"drawn": 3}}}
    store.commit(manifest([store.publish_trajectories(ITERATION, TRAJECTORIES)], **about))
    store.commit(manifest([store.publish_rewards(ITERATION, REWARDS)], Stage.REWARD, **about))
    store.commit(manifest([store.publish_experience(ITERATION, EXPERIENCE)], Stage.EXPERIENCE, **about))


if __name__ == "__main__":
    if folder().exists():
        raise SystemExit(f"{folder()} is kept as it was written")
    write(folder())
