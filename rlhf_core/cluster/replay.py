"""What a replay trains on: looked up, checked and pinned when it first starts.

::

    replay.source ─▶ its run.json and manifests ─▶ do they fit the configuration? ─▶ Replay, in the replay's own run.json
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.context import open_store
from rlhf_core.cluster.rollout_worker import DataFacts
from rlhf_core.config.replay import check_replay, source_config
from rlhf_core.errors import ConfigError, CorruptShardError
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore
from rlhf_core.storage.find_run import check_has_trajectories

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import Config
    from rlhf_core.records import StageManifest, StageRef

READERS = 16  # manifests under way at once


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay trains on; fixed when it first starts."""

    source: RunStore
    first: int  # iterations of the source; iteration k of the replay takes that of number first + k
    last: int
    manifests: tuple[dict[str, Any], ...]  # of each: iteration, and the sha256 of its rollout and reward manifests
    filters_anew: bool  # the source's groups are judged by this run's filter; else its batches are trained as they were
    other_model: bool = False  # it starts from another model than the source, whose tokenizer must be the same

    def to_json(self) -> dict[str, Any]:
        """As run.json has it."""
        return {
            "source": self.source.run_id,
            "source_url": self.source.url,
            "iterations": [self.first, self.last],
            "manifests": list(self.manifests),
            "filters_anew": self.filters_anew,
            "other_model": self.other_model,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], source: RunStore) -> Replay:
        """The inverse of ``to_json``."""
        first, last = body["iterations"]
        flags = {name: bool(body[name]) for name in ("filters_anew", "other_model")}
        return cls(source, int(first), int(last), tuple(body["manifests"]), **flags)

    def stage(self, iteration: int, stage: Stage) -> tuple[StageManifest, StageRef]:
        """A manifest of the source, for iteration ``iteration`` of the replay.

        Raises:
            CorruptShardError: it is gone, or is not the one that was there when the replay started.
        """
        theirs = self.first + iteration
        url = self.source.manifest_url(theirs, stage)
        found = self.source.stage(theirs, stage)
        if found is None:
            raise CorruptShardError(f"{url}, which this replay trains on, is missing: its source was deleted or moved")
        recorded = self.manifests[iteration][stage.value]
        if found[1].sha256 != recorded:
            raise CorruptShardError(
                f"{url} is not the manifest that was there when this replay started (sha256 {recorded}): the source was made "
                "anew; start a new replay"
            )
        return found


def find_source(source: RunStore) -> tuple[dict[str, Any], Config]:
    """The run.json and the configuration of a run with trajectories.

    Raises:
        ConfigError: there is no such run, or it is of a kind that samples nothing.
    """
    if source.read_run() is None:
        raise ConfigError(f"there is no run at {source.url} to replay: check its id and storage.root, or give its URL")
    body = check_has_trajectories(source)
    return body, source_config(body, source.url)


def source_store(config: Config, run_id: str) -> RunStore:
    """The log of the run that ``replay.source`` names, as ``run_id`` reaches it."""
    named = str(config.replay.source).rstrip("/")
    root, _, source_id = named.rpartition("/")
    own = open_store(config, run_id)
    # Options are the source's where the replay's own log lies in a folder, which needs none.
    source = RunStore(source_id, root or own.root, own.options, own.timeout)
    if source.url == own.url:
        raise ConfigError(f"replay.source={named!r} is the replay itself: give it another run_id")
    return source


def storage_for(source: RunStore, root: str | None = None) -> dict[str, Any]:
    """``root`` and, if the source was reached with some, ``options`` of a log beside it, or below another root."""
    options = {"options": source.options} if source.options else {}  # else those that its configuration has
    return {"root": root or source.root, **options}


def new_replay(config: Config, run_id: str) -> tuple[Replay, dict[str, Any]]:
    """What a replay that starts now trains on, and the source's run.json.

    Raises:
        ConfigError: the source is not there, has no such iterations, or does not fit the configuration.
    """
    source = source_store(config, run_id)
    body, sampled_with = find_source(source)
    filters_anew = check_replay(sampled_with, config)
    first, last = scored_iterations(source, config.replay.iterations)
    with ThreadPoolExecutor(READERS, thread_name_prefix="replay") as pool:
        manifests = tuple(pool.map(lambda iteration: _pinned(source, iteration), range(first, last + 1)))
    other_model = sampled_with.actor.model_name_or_path != config.actor.model_name_or_path
    return Replay(source, first, last, manifests, filters_anew, other_model), body


def scored_iterations(source: RunStore, wanted: tuple[int, int] | None) -> tuple[int, int]:
    """First and last iteration to replay: those wanted, else all from the first that have rewards.

    Raises:
        ConfigError: the log does not go so far.
    """
    begun = source.iterations()
    if wanted is not None:
        first, last = wanted
        missing = [i for i in (first, last) if source.stage(i, Stage.REWARD) is None]
        if missing:
            raise ConfigError(
                f"iterations {first}..{last} of {source.url}: iteration {missing[0]} has no rewards; its log begins with "
                f"{begun[0] if begun else 'none'} and goes up to {begun[-1] if begun else 'none'}"
            )
        return first, last
    newest = next((i for i in reversed(begun) if source.stage(i, Stage.REWARD) is not None), None)
    if newest is None:
        raise ConfigError(f"{source.url} has no iteration with trajectories and rewards yet: let it run first")
    return 0, newest


def check_done(source: RunStore, first: int, last: int) -> None:
    """``ConfigError`` if the run has not done these iterations to their end."""
    done = source.newest_update()
    if done is None or last > done[0]:
        raise ConfigError(
            f"iterations {first}..{last} of {source.url} cannot be reproduced: its log has "
            f"{'no update yet' if done is None else f'updates 0..{done[0]}'}"
        )


def facts_of(body: Mapping[str, Any]) -> DataFacts:
    """What a run's prompts are, by its run.json."""
    plan = body["plan"]
    return DataFacts(plan["prompts"], plan["dropped"], plan["fingerprint"])


def _pinned(source: RunStore, iteration: int) -> dict[str, Any]:
    pinned: dict[str, Any] = {"iteration": iteration}
    for stage in (Stage.ROLLOUT, Stage.REWARD):
        found = source.stage(iteration, stage)
        if found is None:
            raise ConfigError(
                f"{source.manifest_url(iteration, stage)} is missing: replay only iterations that are whole"
            )
        pinned[stage.value] = found[1].sha256
    return pinned
