"""A rescoring before it starts: which answers, which reward, under which name; and a reward model of this process.

What scores a run's answers again needs no Ray: functions and servers are what they are in a run, and a reward model is loaded
by the process that asks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config import parse_config
from rlhf_core.config.iteration_range import within
from rlhf_core.data import models_of, pin_models, resolve_model
from rlhf_core.records import Stage
from rlhf_core.rewards.other_source import default_rescoring_name, scorer_of, with_sources
from rlhf_core.storage.find_run import check_has_trajectories, find_run
from rlhf_core.storage.rescored import Rescoring
from rlhf_core.training.reward_source import LocalModelSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import Config
    from rlhf_core.data import PinnedModel
    from rlhf_core.rewards import RewardSource
    from rlhf_core.storage import RunStore


@dataclass(frozen=True, slots=True)
class RescoringPlan:
    """What is to be scored, and with what; made before anything is."""

    store: RunStore
    config: Config  # with the other reward
    scorer: dict[str, Any]
    name: str
    iterations: list[int]
    models: dict[str, PinnedModel]  # policy and reward, where a reward model scores


def plan_rescoring(
    run: str,
    sources: Sequence[str],
    root: str | None = None,
    options: dict[str, Any] | None = None,
    iterations: str | None = None,
    name: str | None = None,
    overrides: Sequence[str] = (),
) -> RescoringPlan:
    """Check a request. Nothing is written and no user code runs.

    Args:
        run: id below ``root``, or URL.
        sources: see ``rewards.other_source``.
        root: storage.root of the run.
        options: of its file system.
        iterations: ``I..J``; default: every one with a complete rollout.
        name: of the rescoring; default: made from the sources.
        overrides: ``reward.key=value``.

    Raises:
        ConfigError: there is no such run, reward or iteration; or the name is taken by another scorer.
    """
    store = find_run(run, root, options)
    body = check_has_trajectories(store)
    own = parse_config(body["config"], source=store.url_of("run.json"))
    config = with_sources(own, sources, overrides)
    there = [number for number in store.iterations() if store.stage(number, Stage.ROLLOUT) is not None]
    chosen = within(iterations, there, store.url)
    models: dict[str, PinnedModel] = {}
    if config.reward.model_name_or_path is not None:
        beside = own.storage.model_copy(update={"root": store.root, "options": store.options})
        models = pin_models({"policy": models_of(own)["policy"]}, beside, body.get("models"))
        models |= pin_models({"reward": config.reward.model_name_or_path}, beside)
    scorer = scorer_of(config, models["reward"].to_json() if models else None)
    name = name or default_rescoring_name(config, digest_of(scorer))
    Rescoring(store, name).check(scorer)
    return RescoringPlan(store, config, scorer, name, chosen, models)


def local_model(plan: RescoringPlan) -> RewardSource | None:
    """The reward model of the plan, loaded; None where it has none."""
    if not plan.models:
        return None
    device = plan.config.run.device
    if device == "auto":
        import torch  # which flows must not load

        device = "gpu" if torch.cuda.is_available() else "cpu"
    reward, policy = (resolve_model(plan.models[role]) for role in ("reward", "policy"))
    return LocalModelSource(plan.config, reward, policy, device="cuda" if device == "gpu" else "cpu")


def digest_of(value: Any) -> str:
    """sha256, hex, of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
