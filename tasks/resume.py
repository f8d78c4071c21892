"""Whether a run may go on: what its log holds against what is asked for now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.config import Config, parse_config, parse_supervised_config
from rlhf_core.config.differences import differences
from rlhf_core.errors import ConfigError
from rlhf_core.storage import read_worlds
from tasks.worlds import in_newest_world, is_move, may_move

if TYPE_CHECKING:
    from rlhf_core.config import SupervisedConfig
    from rlhf_core.storage import RunStore

Resume = Literal["must", "if-present", "never"]
KIND = "rlhf"  # of a run by rewards, in run.json

# Sections and keys that say how a run is operated, not what it computes: they may change between two attempts.
OPERATIONAL = (
    "run",
    "logger",
    "storage",
    "vllm.sync_timeout",
    "vllm.request_timeout",
    "vllm.gpu_memory_utilization",
    "vllm.enable_sleep",
    "vllm.sleep_level",
    "ds.enable_sleep",
    "ref.offload",
    "train.colocate_all",
    "train.colocate_actor_ref",
    "train.colocate_critic_reward",
    "rollout.publish_groups",
    "ckpt.max_num",
    "ckpt.max_mem",
    "rollout.max_consecutive_failures",
    "reward.timeout",
    "reward.num_workers",
    "reward.max_retries",
    "reward.remote_batch_size",
    "reward.remote_concurrency",
    "reward.remote_token_env",
    "reward.model_num_ranks",
    "agent.step_timeout",
    "agent.episode_timeout",
    "agent.max_processes",
    "agent.server.host",
    "data.image_timeout",
    "ds.use_universal_ckpt",
)


def stored_config(store: RunStore) -> Config:
    """The configuration a run was started with, and the processes it was last resumed with.

    Raises:
        ConfigError: there is no such run.
    """
    body = store.read_run()
    if body is None:
        raise ConfigError(f"no run at {store.url}: check the run_id and storage.root")
    return parse_config(in_newest_world(body["config"], read_worlds(store)), source=store.url_of("run.json"))


def check_resume(
    body: dict[str, Any] | None,
    config: Config | SupervisedConfig,
    store: RunStore,
    resume: Resume,
    flow_run_id: str | None,
    kind: str = KIND,
) -> dict[str, tuple[Any, Any]]:
    """Refuse a start that does not fit what the log holds.

    Returns:
        What differs of a run that may go on with other processes: dotted keys, (old, new).

    Args:
        body: of run.json; None if there is no such run.
        config: what is to be run.
        store: the run's log.
        resume: whether the run may, must or must not exist.
        flow_run_id: of the flow run that asks.
        kind: of run: by rewards, or the method of a supervised one.
    """
    if body is None:
        if resume == "must":
            raise ConfigError(f"resume=must, but there is no run at {store.url}: check run_id and storage.root")
        return {}
    own_retry = flow_run_id is not None and body.get("flow_run_id") == flow_run_id
    if resume == "never" and not own_retry:
        raise ConfigError(f"resume=never, but a run exists at {store.url}: choose another run_id, or resume=if-present")
    if body.get("kind", KIND) != kind:
        raise ConfigError(
            f"{store.url} is a run of kind {body.get('kind', KIND)!r}, not {kind!r}: choose another run_id"
        )
    # Through the schema: a key that did not exist when the run was started had its default.
    parse = parse_config if isinstance(config, Config) else parse_supervised_config
    started_with = _settled(parse(body["config"], source=store.url_of("run.json")))
    changed = different_keys(in_newest_world(started_with, read_worlds(store)), _settled(config))
    moves = is_move(changed, config)
    if changed and not (moves and may_move(store, config)):
        listed = "; ".join(f"{key}: {old!r} in the run, {new!r} now" for key, (old, new) in sorted(changed.items()))
        universal = "; only from universal checkpoints can it go on so (ds.use_universal_ckpt=true from the start)"
        raise ConfigError(
            f"{store.url} was started with another configuration ({listed}): resume with the same, or choose another run_id"
            f"{universal if moves else ''}"
        )
    return changed


def different_keys(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys with different values, without operational sections."""
    return differences(old, new, OPERATIONAL)


def _settled(config: Config | SupervisedConfig) -> dict[str, Any]:
    """The configuration as plain values; one that follows from others is what it comes to, whether it was said or not."""
    tree = config.model_dump(mode="json")
    if isinstance(config, Config):
        tree["algo"]["advantage"]["is_correction_enable"] = config.corrects_mismatch
    return tree
