"""A run by rewards as it lies in storage, made of a few lines: what replays and exports read.

::

    save_run(root, [[("g0", [("12", 1.0), ("a", 0.0)])], …])     iterations ─▶ groups ─▶ samples (answer, reward)
"""

import numpy as np

from rlhf_core.config import parse_config
from rlhf_core.records import (
    ActionRange,
    RewardResult,
    RewardStatus,
    SamplingParams,
    Stage,
    StageManifest,
    StopReason,
    Trajectory,
    VersionSpan,
)
from rlhf_core.storage import RewardRow, RunStore

BOS, EOS = 256, 258  # of builtin:tiny, whose other ids are bytes
PROMPT = "Q: "
CONFIG = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "p.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
    "run": {"device": "cpu"},
}


def saved(iteration, group, sample, answer, **changes):
    """One answer; None: the sample failed."""
    prompt = [BOS, *PROMPT.encode()]
    said = [] if answer is None else [*answer.encode(), EOS]
    end = len(prompt) + len(said)
    failed = {"stop_reason": StopReason.ERROR, "error": "ValueError: no", "action_ranges": (), "version_spans": ()}
    fields = {
        "run_id": "run",
        "iteration": iteration,
        "prompt_id": f"row-{group}",
        "group_id": group,
        "sample_index": sample,
        "datasource": "sums",
        "prompt": PROMPT,
        "label": 2,
        "token_ids": np.array(prompt + said, np.int32),
        "action_ranges": (ActionRange(len(prompt), end),),
        "rollout_logprobs": np.array([0.0] * len(prompt) + [-0.5] * len(said), np.float32),
        "version_spans": (VersionSpan(len(prompt), end, iteration),),
        "stop_reason": StopReason.EOS,
        "sampling": SamplingParams(max_tokens=8),
        "answer": answer or "",
        **(failed if answer is None else {}),
    }
    return Trajectory(**(fields | changes))


def result(reward):
    """Of a reward stage; None: the scorer raised."""
    if reward is None:
        return RewardResult(RewardStatus.ERROR, error="it raised")
    return RewardResult(RewardStatus.OK, reward, reward)


def save_run(root, iterations, *, run_id="run", kind="rlhf", config=None, change=None, selected=None):
    """The run's store. ``change(iteration, group, sample)``: further fields of a row; ``selected``: of every rollout."""
    store = RunStore(run_id, str(root))
    tree = parse_config({**CONFIG, **(config or {})}).model_dump(mode="json")
    store.write_run(
        {
            "run_id": run_id,
            "kind": kind,
            "created_at": "2026-01-01T00:00:00+00:00",
            "config": tree,
            "plan": {"fingerprint": "f" * 64, "iterations": len(iterations)},
            "models": {"policy": {"spec": "builtin:tiny"}},
        }
    )
    for iteration, groups in enumerate(iterations):
        parts, rewards = [], []
        for group, samples in groups:
            rows = []
            for index, (answer, reward) in enumerate(samples):
                more = change(iteration, group, index) if change else {}
                rows.append(saved(iteration, group, index, answer, run_id=run_id, **more))
                given = (
                    result(reward) if answer is not None else RewardResult(RewardStatus.SKIPPED, error="ValueError: no")
                )
                rewards.append(RewardRow(group, index, given))
            parts.append(store.publish_trajectories(iteration, rows))
        _commit(store, iteration, Stage.ROLLOUT, parts, {} if selected is None else {"selected": selected})
        _commit(store, iteration, Stage.REWARD, [store.publish_rewards(iteration, rewards)], {})
    return store


def _commit(store, iteration, stage, parts, body):
    rows, tokens = sum(part.rows for part in parts), sum(part.tokens for part in parts)
    store.commit(StageManifest(store.run_id, iteration, stage, tuple(parts), rows, tokens, iteration, body=body))
