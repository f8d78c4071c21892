"""An open retraining: its configuration, its log, the registry, and the claim that only one process makes a turn at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.context import open_store
from rlhf_core.config import Config, RetrainConfig, load_retrain_config, parse_retrain_config, plan_turn
from rlhf_core.data import pin
from rlhf_core.errors import ConfigError
from rlhf_core.lineage import ModelRegistry, make_registry
from rlhf_core.storage import Lease, LeaseOwner, RunStore, acquire
from rlhf_core.storage.retrain_log import RetrainLog, TurnRecord
from tasks.attempts import earlier_attempt_over
from tasks.opening import tracking_uri
from tasks.resume import check_resume

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.lineage import ModelVersion
    from rlhf_core.lineage.registry import Alias
    from rlhf_core.storage.retrain_log import Origin


@dataclass(frozen=True, slots=True)
class Retraining:
    """A retraining that this process works on."""

    config: RetrainConfig
    training: Config  # what a turn trains, without what is the turn's own
    log: RetrainLog
    registry: ModelRegistry
    lease: Lease

    def run_config(self, turn: TurnRecord) -> Config:
        """The configuration of a turn's run."""
        return plan_turn(self.config, turn.start, self.log.store.url_of(turn.rows))

    def run_store(self, turn: TurnRecord) -> RunStore:
        """The log of a turn's run."""
        return open_store(self.training, turn.run_id)


def resolve_retraining(config: str | dict[str, Any], overrides: Sequence[str]) -> RetrainConfig:
    """The retraining of a flow's parameters: a file's name, or the mapping itself."""
    if isinstance(config, str):
        return load_retrain_config(config, overrides)
    return parse_retrain_config(config, overrides)


async def claim(config: RetrainConfig, flow_run_id: str | None = None) -> Retraining:
    """Become the one process that works on a retraining; hold its lease with ``renewed``.

    Args:
        config: of the retraining.
        flow_run_id: of the flow run that asks: a retry waits until its earlier attempt is over.

    Raises:
        ConfigError: it cannot work; the message names key and remedy.
        LeaseError: another process works on it.
    """
    training = plan_turn(config)
    uri = tracking_uri(training)
    if uri is None:
        raise ConfigError(
            "a retraining needs MLflow's model registry, which says who the champion is: set logger.mlflow_uri or "
            "$MLFLOW_TRACKING_URI (rlhf up does)"
        )
    store = open_store(training, config.name)
    await asyncio.to_thread(store.objects.probe)
    if await asyncio.to_thread(store.read_run) is not None:
        raise ConfigError(f"{store.url} is a run: give the retraining another name")
    registry = await asyncio.to_thread(make_registry, uri, config.model)
    await earlier_attempt_over(store, flow_run_id)
    owner = LeaseOwner.of_this_process(flow_run_id or "")
    lease = await asyncio.to_thread(acquire, store, owner, training.run.lease_seconds)
    return Retraining(config, training, RetrainLog(store), registry, lease)


def incumbent(retraining: Retraining) -> tuple[str, Origin, int | None]:
    """Who is to be beaten, and what the turn trains from: (name, how it was found, version in the registry).

    The champion. Without one, whatever the last turn could not beat; in the first turn the best, else the newest, version of
    the registry, else the model of the training configuration.

    Raises:
        ConfigError: its files are gone, or are another model's by now.
    """
    earlier = retraining.log.numbers()
    aliases: tuple[Alias, ...] = ("champion",) if earlier else ("champion", "best", "latest")
    for alias in aliases:
        found = retraining.registry.version(alias)
        if found is None or (found.deleted and alias != "champion"):
            continue
        _check_start(retraining, alias, found)
        return found.checkpoint.spec, alias, found.number
    last = retraining.log.turn(earlier[-1]) if earlier else None
    if last is None or last.start_from == "config":
        return retraining.training.actor.model_name_or_path, "config", None
    return last.start, "incumbent", last.start_version


def check_turn(retraining: Retraining, turn: TurnRecord) -> None:
    """Refuse to go on with a turn whose run was started with another configuration than the retraining has now.

    Raises:
        ConfigError: the message names the keys, and both ways on.
    """
    store = retraining.run_store(turn)
    try:
        check_resume(store.read_run(), retraining.run_config(turn), store, "if-present", None)
    except ConfigError as error:
        raise ConfigError(
            f"turn {turn.number} of {retraining.config.name} is not over, and cannot go on: {error}; or give the turn up: "
            "rlhf retrain -c FILE --abandon"
        ) from error


def abandon_turn(retraining: Retraining) -> int | None:
    """End the open turn without a decision on its challenger. Returns its number; None if there is none.

    Raises:
        ConfigError: it is decided already: the next start carries that out.
    """
    turn = retraining.log.open_turn()
    if turn is None:
        return None
    if retraining.log.decision(turn.number) is not None:
        raise ConfigError(
            f"turn {turn.number} is decided already: start the retraining again, which carries the decision out"
        )
    body = {"turn": turn.number, "run_id": turn.run_id, "verdict": "abandoned", "reason": "given up by hand"}
    retraining.log.write_decision(turn.number, body)
    retraining.log.settle(turn.number)
    return turn.number


def _check_start(retraining: Retraining, alias: str, version: ModelVersion) -> None:
    """The version's files are there, and are those that were registered."""
    whose = f"{alias} of the registered model {retraining.config.model!r} is version {version.number}"
    try:
        model = pin(version.checkpoint.spec, retraining.training.storage)
    except ConfigError as error:
        raise ConfigError(f"{whose}, which cannot be loaded: {error}; give the alias to another version") from error
    assert model.checkpoint is not None, "versions of the registry are checkpoints"
    body = model.checkpoint.checkpoints.get(model.checkpoint.version)
    if body is None or body["digest"] != version.checkpoint.digest:
        raise ConfigError(
            f"{whose}, but {model.origin} holds other weights than were registered: its run was made anew; give the alias to "
            "another version"
        )
