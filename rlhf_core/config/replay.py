"""What a replay may change of the run whose trajectories it trains on.

::

    source's configuration + changes ── replay_config ──▶ the configuration of a run of its own
    source's and its own             ── check_replay ───▶ whether the source's batches are filtered anew

What was sampled, and with what, belongs to the source; how it is scored, and all that is learned from it, may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.config.differences import differences
from rlhf_core.config.load import parse_config
from rlhf_core.config.model_spec import is_run_model
from rlhf_core.config.rules import default_at
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import TypeAlias

    from rlhf_core.config.model import Config

    Span: TypeAlias = tuple[int, int]  # first and last

# Sections and keys that decided what was sampled.
SAMPLED = (
    "data",
    "vllm",
    "rollout",
    "agent",
    "train.num_episodes",
    "train.max_iterations",
    "train.agent_func_path",
    "train.async_enable",
    "train.async_queue_size",
    "train.partial_rollout_enable",
    "train.partial_rollout_kv",
)
# Of those sections: how the samples are trained, and how the run is operated.
OF_TRAINING = (
    "rollout.micro_batch_size",
    "rollout.max_tokens_per_gpu",
    "rollout.publish_groups",
    "rollout.max_consecutive_failures",
    "vllm.gpu_memory_utilization",
    "vllm.enable_sleep",
    "vllm.sleep_level",
    "vllm.sync_timeout",
    "vllm.request_timeout",
    "agent.step_timeout",
    "agent.episode_timeout",
    "agent.max_processes",
    "data.image_timeout",
)
# What a sample's reward depends on; shaping (clipping, overlong answers) is applied to whatever reward there is.
SCORED = (
    "reward.functions",
    "reward.remote_url",
    "reward.remote_weight",
    "reward.model_name_or_path",
    "reward.model_weight",
    "reward.model_max_len",
    "reward.normalize_enable",
)
FILTERED = (
    "algo.dynamic_filtering_enable",
    "algo.dynamic_filtering_range",
    "algo.dynamic_filtering_max_rounds",
    "algo.dynamic_filtering_on_limit",
)

# Where the name of a role's model stands.
SECTION_OF = {"policy": "actor", "reference": "ref", "critic": "critic", "reward": "reward"}


def replay_config(
    body: Mapping[str, Any], url: str, storage: Mapping[str, Any], changes: Iterable[str], iterations: Span | None
) -> Config:
    """The configuration of a replay: the source's, changed.

    It starts from the very models that the source started from, and with as many threads. The samples come from another
    policy as soon as anything differs: the correction for that is on unless ``changes`` say otherwise. Nothing can be
    evaluated without an engine.

    Args:
        body: run.json of the run with the trajectories.
        url: where that run lies.
        storage: ``root`` and ``options`` for the replay's own log, if ``changes`` do not say.
        changes: ``section.key=value``.
        iterations: first and last of the source's; None: all.

    Raises:
        ConfigError: a change cannot work.
    """
    source = source_config(body, url)
    tree = source.model_dump(mode="json")
    tree["replay"] = {"source": url, "iterations": iterations}
    tree["storage"].update(storage)
    tree["run"]["cpu_threads"] = body.get("cpu_threads")
    tree["eval"]["dataset"] = []
    tree["ckpt"]["best_metric_key"] = None
    tree["ckpt"]["best_metric_mode"] = default_at(source, "ckpt.best_metric_mode")
    tree["algo"]["advantage"]["is_correction_enable"] = True
    listed = list(changes)
    changed = parse_config(tree, listed, source="the replay")
    if changed.replay.rewards == "source" and _within(_changed(source, changed), SCORED):
        return parse_config(tree, ["replay.rewards=anew", *listed], source="the replay")
    return changed


def source_config(body: Mapping[str, Any], url: str) -> Config:
    """The configuration of a run with trajectories; of models that other runs made it names the very checkpoints.

    Args:
        body: its run.json.
        url: where it lies.
    """
    config = parse_config(body["config"], source=f"{url}/run.json")
    tree = config.model_dump(mode="json")
    for role, model in (body.get("models") or {}).items():
        named = tree[SECTION_OF[role]]
        if is_run_model(named["model_name_or_path"] or ""):  # else it has the model of another role
            named["model_name_or_path"] = exact_name(model)
    return parse_config(tree)


def check_replay(source: Config, own: Config) -> bool:
    """Refuse a replay that its source's trajectories do not fit.

    Args:
        source: of ``source_config``.
        own: the replay's.

    Returns:
        True if the groups that the source sampled are filtered anew, False if its batches are trained as they were.

    Raises:
        ConfigError: with every key that differs and must not.
    """
    changed = _changed(source, own)
    problems = [
        f"{key}: {old!r} in {own.replay.source}, {new!r} here: it decided what was sampled, and a replay samples nothing; "
        "leave it as it was, or train a run of its own"
        for key, (old, new) in sorted(changed.items())
        if _within([key], SAMPLED) and not _within([key], OF_TRAINING)
    ]
    scored = _within(changed, SCORED)
    if scored and own.replay.rewards == "source":
        problems.append(
            f"{', '.join(scored)} differ from {own.replay.source}, and replay.rewards=source keeps its rewards: set "
            "replay.rewards=anew to score its answers again"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    if not (source.algo.dynamic_filtering_enable or own.algo.dynamic_filtering_enable):
        return False
    return bool(_within(changed, FILTERED)) or (own.algo.dynamic_filtering_enable and own.replay.rewards == "anew")


def exact_name(model: Mapping[str, Any]) -> str:
    """Of a model that a run made, as run.json has it: the ``run:`` name that means this one for ever, and from anywhere."""
    place = str(model["url"]).removesuffix(f"/checkpoints/v{int(model['version']):08d}")
    return f"run:{place}@{model['version']}"


def _changed(source: Config, own: Config) -> dict[str, tuple[Any, Any]]:
    return differences(source.model_dump(mode="json"), own.model_dump(mode="json"))


def _within(keys: Iterable[str], places: Collection[str]) -> list[str]:
    """Those of the keys that are one of ``places``, or lie below one."""
    return sorted(key for key in keys if any(key == place or key.startswith(f"{place}.") for place in places))
