"""What the model registry is told of a run's checkpoints."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Config
from rlhf_core.config.model_spec import EXPORT
from rlhf_core.lineage import Measured, ModelCheckpoint, user_code
from rlhf_core.storage import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import SupervisedConfig
    from tasks.run import AnyRun

DIGITS = 16

# What an evaluation depends on, besides the model and eval.dataset's contents; and which of these keys change no value.
MEASURED_BY = ("eval", "data", "reward")
NEUTRAL = {
    "eval": ("steps",),
    "data": (
        *("prompt_dataset", "prompt_split", "prompt_probs", "dataset", "split", "probs"),
        *("only_rows", "max_samples", "id_key", "overlong"),
        *("image_max_bytes", "image_max_pixels", "image_timeout"),  # an image beyond them is an error
    ),
    "agent": ("step_timeout", "episode_timeout", "max_processes"),
    "reward": ("num_workers", "batch_size", "timeout", "max_retries", "remote_batch_size", "remote_concurrency"),
}
ANSWERED_BY = ("max_new_tokens", "stop", "ignore_eos")


def exported(
    run: AnyRun, version: int, checkpoint: Mapping[str, Any], evaluation: Mapping[str, Any] | None
) -> ModelCheckpoint | None:
    """A checkpoint as the registry has it; None if it holds no exported model (``ckpt.save_hf``).

    Args:
        run: that made it.
        version: of its model.
        checkpoint: body of checkpoint.json.
        evaluation: recorded of the version, if there is one.
    """
    if not any(entry["path"].startswith(f"{EXPORT}/") for entry in checkpoint["files"]):
        return None
    key, measured = run.config.ckpt.best_metric_key, None
    if key is not None and evaluation is not None and key in evaluation["metrics"]:
        value = float(evaluation["metrics"][key])
        code = evaluation.get("user_code", {})
        measured = Measured(key, value, run.config.ckpt.best_metric_mode, comparable(run.config, code))
    return ModelCheckpoint(
        run_id=run.run_id,
        run_url=run.store.url,
        policy_version=version,
        uri=CheckpointStore(run.store).url(version),
        digest=str(checkpoint["digest"]),
        measured=measured,
    )


def comparable(config: Config | SupervisedConfig, code: Mapping[str, str]) -> str:
    """A digest of how a run evaluates: metrics of two runs compare only where it is the same.

    Args:
        config: the run's.
        code: the user's Python files -> sha256, as they were when it evaluated.
    """
    tree = config.model_dump(mode="json")
    measured = {
        name: {key: value for key, value in tree[name].items() if key not in NEUTRAL[name]}
        for name in MEASURED_BY
        if name in tree
    }
    if isinstance(config, Config):
        measured["rollout"] = {key: tree["rollout"][key] for key in ANSWERED_BY}
        if config.execution_mode != "single_turn":
            agent = {key: value for key, value in tree["agent"].items() if key not in NEUTRAL["agent"]}
            measured["agent"] = agent | {"agent_func_path": config.train.agent_func_path}
    measured["ckpt"] = {"best_metric_key": config.ckpt.best_metric_key, "mode": config.ckpt.best_metric_mode}
    measured["code"] = {path: code.get(path) for path in user_code(measured)}
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:DIGITS]
