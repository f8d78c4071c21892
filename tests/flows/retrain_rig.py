"""A retraining whose training run is scripted: it leaves behind what a run does, and learns what the test says."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prefect import flow, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows import retrain as retrain_flow
from rlhf_core.config import parse_config
from rlhf_core.data.row_list import read_row_list
from rlhf_core.lineage import make_tracker
from rlhf_core.records import (
    ActionRange,
    SamplingParams,
    Stage,
    StageManifest,
    StopReason,
    Trajectory,
    VersionSpan,
)
from rlhf_core.storage import CheckpointStore, LeaseOwner, RunStore, acquire
from rlhf_core.storage.retrain_log import RetrainLog
from tasks.lineage import _tell
from tasks.plan import RunPlan
from tasks.run import OpenRun

HELD_OUT = 4  # prompts


class Holder:
    """A session that nobody asks."""

    def check_lease(self):
        """Held."""


@dataclass
class Rig:
    """What the scripted runs do, and did."""

    root: str
    mlflow_uri: str
    name: str
    scores: dict[int, tuple[float, float]] = field(default_factory=dict)  # turn -> held-out score before, after
    draws: dict[int, int] = field(default_factory=dict)  # turn -> prompts that its run samples; default: all of them
    breaks: list[int] = field(default_factory=list)  # turns whose run fails once, after it has begun
    ran: list[str] = field(default_factory=list)
    configs: dict[str, dict] = field(default_factory=dict)

    @property
    def log(self):
        return RetrainLog(RunStore(self.name, self.root))

    def prompts(self, count):
        """There are ``count`` prompts now."""
        rows = [json.dumps({"input": f"prompt {i}", "id": f"row-{i}"}) for i in range(count)]
        (self.folder / "prompts.jsonl").write_text("\n".join(rows))

    @property
    def folder(self):
        return Path(self.root).parent

    def retraining(self, **changes):
        training = {
            "actor": {"model_name_or_path": "builtin:tiny"},
            "data": {"prompt_dataset": [str(self.folder / "prompts.jsonl")], "label_key": None, "id_key": "id"},
            "eval": {"dataset": ["held_out.jsonl"]},
            "reward": {"functions": [{"use": "digits"}]},
            "storage": {"root": self.root},
            "logger": {"mlflow_uri": self.mlflow_uri, "mlflow_experiment": "retraining"},
        }
        return {"name": self.name, "config": training, "margin": 0.1, **changes}

    async def turn(self, *overrides, **changes):
        """Make a turn. Returns its final state."""
        return await retrain_flow.retrain(self.retraining(**changes), list(overrides), return_state=True)

    def training(self):
        """The flow of the training run."""

        @flow(name="rlhf", persist_result=False)
        async def train(config: dict, overrides: list | None = None, run_id: str = "") -> None:
            self.ran.append(run_id)
            self.configs[run_id] = config
            number = int(run_id.rsplit("-", 1)[1])
            run = self._open(parse_config(config), run_id)
            if run.store.read_run() is None:
                models = {"policy": {"spec": run.config.actor.model_name_or_path}}
                run.store.write_run(
                    {"config": config, "plan": {}, "models": models, "created_at": "2026-01-01T00:00:00"}
                )
            if number in self.breaks:
                self.breaks.remove(number)
                raise RuntimeError(f"turn {number} fails on purpose")
            self._learn(run, number)

        return train

    def _open(self, config, run_id):
        tracker = make_tracker(config.logger.mlflow_uri, config.logger.mlflow_experiment, config.logger.mlflow_model)
        plan = RunPlan(prompts=1, dropped=0, fingerprint="f", iterations=1, total_steps=1)
        return OpenRun(run_id, config, RunStore(run_id, config.storage.root), Holder(), plan, tracker)

    def _learn(self, run, number):
        store, config = run.store, run.config
        rows = sorted(read_row_list(config.data.only_rows, config.storage).row_ids)
        drawn = rows[: self.draws.get(number, len(rows))]
        part = store.publish_trajectories(0, [trajectory(row) for row in drawn])
        stamp = {"started_at": 100.0, "seconds": 1.0, "metrics": {"reward/mean": 0.5}}
        bodies = {
            Stage.ROLLOUT: {"drawn": len(drawn), "cursor_out": {"epoch": 1, "offset": 0}},
            Stage.REWARD: {},
            Stage.EXPERIENCE: {"ledger": {}, "kl_coef": 0.0},
            Stage.UPDATE: {"digest": run.run_id, "optimizer_steps": 1},
        }
        for stage, body in bodies.items():
            parts, total = ((part,), part) if stage is Stage.ROLLOUT else ((), None)
            sizes = (total.rows, total.tokens) if total else (0, 0)
            store.commit(StageManifest(run.run_id, 0, stage, parts, *sizes, 0, body={**stamp, **body}))
        for version, score in enumerate(self.scores[number]):
            store.write_evaluation(version, evaluation(version, score))
        folder = self.folder / f"export-{run.run_id}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(run.run_id)
        files = CheckpointStore(store).add_files(1, folder, "hf")
        CheckpointStore(store).commit(1, {"digest": f"weights of {run.run_id}", **stamp}, files)
        for telling in run.tellings:
            _tell(run, telling, over=True, leaving=False)
        store.write_end(1)

    def other_process(self):
        """The lease of one that works on the retraining."""
        return acquire(RunStore(self.name, self.root), LeaseOwner("elsewhere", "m", 1, 0.0, "other"), 60)


def evaluation(version, mean):
    """Scores of the held-out prompts, around a mean; of version 1 twice as far from it as of version 0."""
    spread = [(version + 1) * share for share in (-0.05, 0.05, -0.02, 0.02)]
    outcomes = [
        {
            "prompt": f"held-{i}",
            "text_sha256": "s",
            "rewards": [mean + spread[i], None],
            "scores": [mean + spread[i], None],
        }
        for i in range(HELD_OUT)
    ]
    return {
        "version": version,
        "parts": [],
        "metrics": {"eval/score_mean": mean},
        "samples": [],
        "outcomes": outcomes,
        "started_at": 1.0,
        "seconds": 1.0,
    }


def trajectory(row_id):
    return Trajectory(
        run_id="run",
        iteration=0,
        prompt_id=row_id,
        group_id=f"0000-{row_id}",
        sample_index=0,
        datasource="prompts",
        prompt="p",
        label=None,
        token_ids=np.array([1, 2, 3], np.int32),
        action_ranges=(ActionRange(1, 3),),
        rollout_logprobs=np.array([0.0, -0.5, -0.5], np.float32),
        version_spans=(VersionSpan(1, 3, 0),),
        stop_reason=StopReason.EOS,
        sampling=SamplingParams(max_tokens=8, seed=5),
        answer="a",
    )


async def artifacts(key):
    """What the artifacts of a key show, oldest first."""
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
    return [each.data for each in sorted(found, key=lambda each: each.created)]
