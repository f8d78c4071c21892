"""Other rewards for the saved trajectories of a run, beside those that it was trained with.

::

    {run}/rescored/{name}/rescoring.json                       who scores: sources, code, model; written once, first
    {run}/rescored/{name}/00000012/{sha256}/….arrow            rewards of one part of its rollout, by that part's sha256
    {run}/rescored/{name}/00000012.json                        the manifest: iteration 12 is rescored
    {run}/rescored/{name}/report.json, scatter-….png           the newest comparison, which may be made again at any time

They lie in the run, because they mean nothing without its trajectories; the run's own stages, its lease and its plan are not
touched, so a run may be rescored while it trains. A part is made durable as soon as it is scored: an attempt that died is gone
on with, and two at once make the same name complete once, by the first writer of each manifest.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, ConflictError, CorruptShardError, StorageError
from rlhf_core.records import Part, Stage
from rlhf_core.storage.digest import sha256_of
from rlhf_core.storage.documents import decode_document, encode_document
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.records import StageRef
    from rlhf_core.storage.run_store import RunStore
    from rlhf_core.storage.shards import RewardRow

logger = get_logger(__name__)

FOLDER = "rescored"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class RescoredPart:
    """The new rewards of one part of a rollout."""

    source: str  # sha256 of the part with the trajectories
    part: Part


class Rescoring:
    """One named set of rewards of a run."""

    def __init__(self, store: RunStore, name: str) -> None:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a rescoring: use up to 100 of the characters A-Z a-z 0-9 . _ -, a letter or digit first"
            )
        self.store = store
        self.name = name

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.store.url_of(self._folder)

    # --- who scores

    def begin(self, scorer: Mapping[str, Any], **about: Any) -> None:
        """Record who scores, once.

        Args:
            scorer: what the rewards depend on, as JSON: sources with their weights, digests of code and model.
            about: what else is worth knowing of the first start.

        Raises:
            ConfigError: rewards of that name were given by another scorer; it names what differs.
        """
        if self.scorer() is None:
            body = {"run_id": self.store.run_id, "name": self.name, "scorer": dict(scorer), **about}
            body["created_at"] = datetime.now(UTC).isoformat(timespec="seconds")
            try:
                self.store.objects.put_once(*self._document("rescoring.json", body))
            except ConflictError:
                logger.warning("%s was begun at the same time by another process", self.url)
        self.check(scorer)

    def check(self, scorer: Mapping[str, Any]) -> None:
        """Refuse to mix the rewards of two scorers; errors as ``begin``."""
        recorded = self.scorer()
        if recorded is not None and recorded != dict(scorer):
            was = {name: value for name, value in recorded.items() if value != scorer.get(name)}
            now = {name: value for name, value in scorer.items() if value != recorded.get(name)}
            raise ConfigError(
                f"{self.url} holds rewards of another scorer (there {was}, now {now}): give this one another --name"
            )

    def scorer(self) -> dict[str, Any] | None:
        """Who scored; None if there are no rewards of that name."""
        body = self._read("rescoring.json")
        return None if body is None else dict(body["scorer"])

    # --- rewards

    def publish(self, iteration: int, source: Part, rows: Sequence[RewardRow]) -> Part:
        """Make the rewards of one part of a rollout durable."""
        return self.store.publish_rewards(iteration, rows, f"{self._folder}/{iteration:08d}/{source.sha256}")

    def published(self, iteration: int, source: Part) -> Part | None:
        """What an earlier attempt left for a part of a rollout; a damaged one is made again."""
        found = self.store.parts_in(f"{self._folder}/{iteration:08d}/{source.sha256}")
        return found[0] if found else None

    def commit(self, iteration: int, rollout: StageRef, parts: Sequence[RescoredPart], body: Mapping[str, Any]) -> None:
        """Complete an iteration: its first manifest counts.

        Args:
            iteration: its number.
            rollout: whose trajectories were scored.
            parts: the rewards, one for each of its parts.
            body: counts and times.

        Raises:
            StorageError: a part is gone again.
        """
        present = self.store.objects.sizes(f"{self._folder}/{iteration:08d}")
        if missing := [
            rescored.part.path for rescored in parts if present.get(rescored.part.path) != rescored.part.bytes
        ]:
            raise StorageError(f"{self.store.url_of(missing[0])} is not there any more: start the rescoring again")
        manifest = {
            "run_id": self.store.run_id,
            "name": self.name,
            "iteration": iteration,
            "rollout": rollout.sha256,
            "parts": [{**asdict(rescored.part), "source": rescored.source} for rescored in parts],
            "rows": sum(rescored.part.rows for rescored in parts),
            **body,
        }
        try:
            self.store.objects.put_once(*self._document(f"{iteration:08d}.json", manifest))
        except ConflictError:
            logger.warning("iteration %d of %s was complete already: its first manifest stays", iteration, self.url)

    def manifest(self, iteration: int) -> dict[str, Any] | None:
        """The manifest of a rescored iteration; None if it is not complete.

        Raises:
            CorruptShardError: it is damaged, of another iteration, or of a rollout that is not the run's.
        """
        body = self._read(f"{iteration:08d}.json")
        if body is None:
            return None
        url = self.store.url_of(f"{self._folder}/{iteration:08d}.json")
        if (body["run_id"], body["name"], body["iteration"]) != (self.store.run_id, self.name, iteration):
            raise CorruptShardError(
                f"{url} is of {body['run_id']}, {body['name']}, {body['iteration']}: it belongs elsewhere"
            )
        rollout = self.store.stage(iteration, Stage.ROLLOUT)
        if rollout is None or rollout[1].sha256 != body["rollout"]:
            raise CorruptShardError(
                f"{url} scores the rollout with sha256 {body['rollout']}, but the run has "
                f"{rollout[1].sha256 if rollout else 'none'}: remove the folder {self.url}, and score again"
            )
        return body

    def manifest_ref(self, iteration: int) -> tuple[str, str]:
        """(path, sha256) of a rescored iteration's manifest."""
        path = f"{self._folder}/{iteration:08d}.json"
        return path, sha256_of(self.store.objects.read(path))

    def rewards(self, iteration: int) -> list[RewardRow]:
        """The rewards of a rescored iteration.

        Raises:
            ConfigError: it is not rescored.
            CorruptShardError: a part is missing or damaged.
        """
        manifest = self.manifest(iteration)
        if manifest is None:
            raise ConfigError(
                f"{self.url} has no rewards of iteration {iteration}: start the rescoring again, or choose others"
            )
        fields = Part.__dataclass_fields__
        return self.store.read_rewards([Part(**{name: part[name] for name in fields}) for part in manifest["parts"]])

    # --- the comparison

    def write_report(self, body: dict[str, Any], plot: bytes) -> str:
        """Keep the newest comparison and its picture; returns the URL of the picture."""
        digest = sha256_of(plot)
        path = f"{self._folder}/scatter-{digest[:16]}.png"
        self.store.objects.put(path, plot)
        named = {**body, "plot": {"path": path, "sha256": digest, "bytes": len(plot)}}
        self.store.objects.put(*self._document("report.json", named))
        return self.store.url_of(path)

    def report(self) -> dict[str, Any] | None:
        """The newest comparison; None if none was made."""
        return self._read("report.json")

    # --- inside

    @property
    def _folder(self) -> str:
        return f"{FOLDER}/{self.name}"

    def _document(self, name: str, body: dict[str, Any]) -> tuple[str, bytes]:
        path = f"{self._folder}/{name}"
        return path, encode_document(body, self.store.url_of(path))

    def _read(self, name: str) -> dict[str, Any] | None:
        path = f"{self._folder}/{name}"
        try:
            return decode_document(self.store.objects.read(path), self.store.url_of(path))
        except FileNotFoundError:
            return None


def existing_rescoring(store: RunStore, name: str) -> Rescoring:
    """A rescoring that was begun.

    Raises:
        ConfigError: there is none of that name; it names those there are.
    """
    rescoring = Rescoring(store, name)
    if rescoring.scorer() is None:
        there = ", ".join(store.objects.children(FOLDER)) or "none"
        raise ConfigError(
            f"{store.url} has no rescored rewards {name!r}; it has {there} (rlhf replay RUN --rescore FILE)"
        )
    return rescoring
