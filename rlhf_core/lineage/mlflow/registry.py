"""The model registry of MLflow.

A version is found again by two tags, the checkpoint's URI and the digest of its weights: told twice it is one version, and a
run that was made anew under its old name gives new ones. MLflow numbers versions itself; of two that two processes made at once
for one checkpoint, the lower number stays.

``latest`` is MLflow's own alias for the highest number. ``best`` is computed from the tags of all versions, after each change
and until it stands still, so that of several runs the last to look sees what the others wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.lineage.mlflow.client import MlflowClient, MlflowException, TrackerError, away, is_server
from rlhf_core.lineage.registry import Alias, Measured, Mode, ModelCheckpoint, ModelVersion, best_of
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

logger = get_logger(__name__)

CHAMPION: Alias = "champion"
BEST: Alias = "best"
PAGE = 1000  # versions of one answer
LOOKS = 20  # at `best`, before the runs that move it are left to settle it themselves

URI, DIGEST, RUN_ID, RUN_URL, POLICY_VERSION = (
    "rlhf.uri",
    "rlhf.weight_digest",
    "rlhf.run_id",
    "rlhf.run_url",
    "rlhf.policy_version",
)
METRIC, VALUE, MODE, COMPARABLE = "rlhf.metric", "rlhf.value", "rlhf.mode", "rlhf.measured_as"
DELETED = "rlhf.deleted"


class MlflowRegistry:
    """See ``ModelRegistry``."""

    def __init__(self, uri: str, model: str) -> None:
        self._uri = uri
        self._model = model
        self._client = MlflowClient(tracking_uri=uri)

    def register(self, checkpoint: ModelCheckpoint, tracker_run: str, tracker_model: str) -> int:
        """A version with everything about the checkpoint in its tags."""
        try:
            known = self.find(checkpoint.uri, checkpoint.digest)
            if known is None:
                number = self._create(checkpoint, tracker_run, tracker_model)
            else:
                number = known.number
                if known.deleted:
                    self._restore(known)
            self._settle_best()
        except MlflowException as error:
            raise self._away(f"version of {checkpoint.uri}", error) from error
        return number

    def mark_deleted(self, run_url: str, kept: Collection[int]) -> None:
        """A tag, and a sentence in the description; ``best`` moves on."""
        try:
            gone = [
                version
                for version in self._versions()
                if version.checkpoint.run_url == run_url
                and version.checkpoint.policy_version not in kept
                and not version.deleted
            ]
            for version in gone:
                self._client.set_model_version_tag(self._model, str(version.number), DELETED, "true")
                text = f"Its files are deleted (ckpt.max_num, ckpt.max_mem): {version.checkpoint.uri}"
                self._client.update_model_version(self._model, str(version.number), text)
            if gone:
                self._settle_best()
        except MlflowException as error:
            raise self._away("deleted versions", error) from error

    def version(self, alias: Alias) -> ModelVersion | None:
        """By MLflow's alias; of versions that something else registered, without a checkpoint of ours, nobody has it."""
        try:
            return _read(self._client.get_model_version_by_alias(self._model, alias))
        except MlflowException as error:
            if _is_absent(error, alias):
                return None
            raise self._away(f"alias {alias}", error) from error

    def find(self, uri: str, digest: str) -> ModelVersion | None:
        """By its tags."""
        try:
            found = [v for v in self._versions() if (v.checkpoint.uri, v.checkpoint.digest) == (uri, digest)]
        except MlflowException as error:
            raise self._away(f"search for {uri}", error) from error
        return min(found, key=lambda version: version.number, default=None)

    def promote(self, number: int) -> None:
        """Move the alias."""
        try:
            self._client.set_registered_model_alias(self._model, CHAMPION, str(number))
        except MlflowException as error:
            raise self._away(f"promotion of version {number}", error) from error

    def tag(self, number: int, tags: Mapping[str, str]) -> None:
        """MLflow's tags of the version."""
        try:
            for key, value in tags.items():
                self._client.set_model_version_tag(self._model, str(number), key, value)
        except MlflowException as error:
            raise self._away(f"tags of version {number}", error) from error

    @property
    def url(self) -> str | None:
        """The model's page, where the tracking store is a server."""
        return f"{self._uri}/#/models/{self._model}" if is_server(self._uri) else None

    def _create(self, checkpoint: ModelCheckpoint, tracker_run: str, tracker_model: str) -> int:
        self._create_model()
        # A server refuses a folder of its own machine as a source. The logged model stands for it; the tag says where it lies.
        local = checkpoint.uri.startswith("file:") and is_server(self._uri)
        made = self._client.create_model_version(
            self._model,
            f"models:/{tracker_model}" if local else checkpoint.uri,
            run_id=tracker_run,
            model_id=tracker_model,
            tags=_tags(checkpoint),
            description=_description(checkpoint),
        )
        number = int(made.version)
        first = self.find(checkpoint.uri, checkpoint.digest)
        if first is None or first.number >= number:
            return number
        self._client.delete_model_version(self._model, str(number))  # another process was faster
        return first.number

    def _restore(self, version: ModelVersion) -> None:
        """Its files are there again: a run that went back to an older checkpoint made the same weights once more."""
        self._client.delete_model_version_tag(self._model, str(version.number), DELETED)
        self._client.update_model_version(self._model, str(version.number), _description(version.checkpoint))

    def _create_model(self) -> None:
        try:
            self._client.create_registered_model(self._model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _settle_best(self) -> None:
        for _ in range(LOOKS):
            best, holder = best_of(list(self._versions())), self.version(BEST)
            if best is None or (holder is not None and holder.number == best.number):
                return
            self._client.set_registered_model_alias(self._model, BEST, str(best.number))
        logger.warning("registered model %s: other runs keep moving the alias 'best'", self._model)

    def _versions(self) -> Iterator[ModelVersion]:
        token = None
        while True:
            found = self._client.search_model_versions(f"name='{self._model}'", max_results=PAGE, page_token=token)
            yield from (version for version in map(_read, found) if version is not None)
            token = found.token
            if not token:
                return

    def _away(self, what: str, error: Exception) -> TrackerError:
        return away(self._uri, f"{what} (registered model {self._model})", error)


def _tags(checkpoint: ModelCheckpoint) -> dict[str, str]:
    tags = {
        URI: checkpoint.uri,
        DIGEST: checkpoint.digest,
        RUN_ID: checkpoint.run_id,
        RUN_URL: checkpoint.run_url,
        POLICY_VERSION: str(checkpoint.policy_version),
    }
    measured = checkpoint.measured
    if measured is not None:
        tags |= {METRIC: measured.metric, VALUE: repr(measured.value), MODE: measured.mode}
        tags[COMPARABLE] = measured.comparable
    return tags


def _description(checkpoint: ModelCheckpoint) -> str:
    return f"Version {checkpoint.policy_version} of run {checkpoint.run_id}: {checkpoint.uri}"


def _read(found: Any) -> ModelVersion | None:
    """A version of MLflow's; None if it is no checkpoint of ours."""
    tags: Mapping[str, str] = found.tags
    if URI not in tags:
        return None
    measured = None
    if METRIC in tags:
        mode: Mode = "min" if tags[MODE] == "min" else "max"
        measured = Measured(tags[METRIC], float(tags[VALUE]), mode, tags[COMPARABLE])
    checkpoint = ModelCheckpoint(
        tags[RUN_ID], tags[RUN_URL], int(tags[POLICY_VERSION]), tags[URI], tags[DIGEST], measured
    )
    return ModelVersion(int(found.version), checkpoint, tags.get(DELETED) == "true")


def _is_absent(error: MlflowException, alias: Alias) -> bool:
    """MLflow says INVALID_PARAMETER_VALUE of an alias that there is not, and only the text tells it from a bad request."""
    return error.error_code == "RESOURCE_DOES_NOT_EXIST" or f"alias {alias} not found" in str(error)
