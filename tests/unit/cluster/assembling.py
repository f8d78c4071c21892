"""The advantage stage on rows of a real log: what is trained, and what is said of it."""

import uuid
from types import SimpleNamespace

from minimal_config import config

from rlhf_core.cluster import scoring_worker
from rlhf_core.cluster.scoring_worker import ScoringWorker
from rlhf_core.records import RewardResult, RewardStatus, Stage, StageManifest
from rlhf_core.storage import RewardRow, RunStore


async def assembled(monkeypatch, rows, *overrides, iteration=5):
    """Experience and metrics of an iteration whose batch is ``rows``; the policy says of them what the engine said."""
    store = RunStore("run", f"memory://{uuid.uuid4().hex}")
    checked = config("algo.advantage.estimator=dr_grpo", *overrides)
    asked = [] if checked.reuses_logprobs else ["the ranks'"]
    part = store.publish_trajectories(iteration, rows)
    rollout = store.commit(StageManifest("run", iteration, Stage.ROLLOUT, (part,), len(rows), part.tokens, iteration))
    scores = [RewardRow(r.group_id, r.sample_index, RewardResult(RewardStatus.OK, r.reward, r.reward)) for r in rows]
    scored = store.publish_rewards(iteration, scores)
    reward = store.commit(StageManifest("run", iteration, Stage.REWARD, (scored,), len(rows), 0, iteration))

    async def merged(references):
        return {r.key: r.rollout_logprobs for r in rows}

    monkeypatch.setattr(scoring_worker, "_merged", merged)
    worker = ScoringWorker(SimpleNamespace(enter=lambda worker: None, config=checked, store=store))
    answers = {"policy": asked, "reference": [], "critic": []}
    found = await worker.assemble(iteration, rollout, reward, 0.0, answers)
    return store.read_experience(found.parts), found.metrics
