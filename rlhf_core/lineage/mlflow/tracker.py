"""MLflow: one run per training run, trajectories as dataset inputs, checkpoints as logged models.

One MLflow run is found or made by its tag ``rlhf.run_id``; ``rlhf.logged_iterations`` says how far it has been told, so that
iterations which could not be told while the server was away follow later, and none is told twice. The model of the best
checkpoint has the tag ``best``, and the run says which it is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mlflow.data.http_dataset_source import HTTPDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import (
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    RunStatus,
    RunTag,
)

from rlhf_core.lineage.mlflow.client import MlflowClient, MlflowException, TrackerError, away, is_server
from rlhf_core.lineage.mlflow.registry import DELETED, MlflowRegistry
from rlhf_core.lineage.names import metric_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rlhf_core.lineage.tracker import BestRecord, CheckpointRecord, DatasetRecord

RUN_TAG = "rlhf.run_id"
LOGGED_TAG = "rlhf.logged_iterations"
BEST_TAG = "best"
REPORT = "report.html"
MAX_DIGEST = 36  # characters MLflow keeps of a dataset's digest
MAX_PARAM = 6000  # characters MLflow keeps of a parameter
MAX_PARAMS = 100  # parameters of one request
MAX_TAG = 8000  # characters MLflow keeps of a tag


class MlflowTracker:
    """See ``Tracker``."""

    name = "MLflow"

    def __init__(self, uri: str, experiment: str, model: str | None = None) -> None:
        self._registry = None if model is None else MlflowRegistry(uri, model)
        self._uri = uri
        self._experiment = experiment
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id: str | None = None
        self._experiment_id = ""
        self._best: BestRecord | None = None  # told by this process

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin, or find, the MLflow run of ``run_id``."""
        try:
            self._experiment_id = self._experiment_for(self._experiment)
            found = self._client.search_runs([self._experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'", max_results=1)
            if found:
                self._run_id = found[0].info.run_id
                self._client.update_run(self._run_id, status=RunStatus.to_string(RunStatus.RUNNING))
                # As they are now: the run may have gone on with other processes since.
                self._client.log_batch(self._run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            else:
                labels = {**tags, RUN_TAG: run_id}
                self._run_id = self._client.create_run(self._experiment_id, run_name=run_id, tags=labels).info.run_id
            if not found or LOGGED_TAG not in found[0].data.tags:  # new, or cut off before its configuration was told
                self._tell_config(config)
                self._client.set_tag(self._run_id, LOGGED_TAG, "0")
        except MlflowException as error:
            raise self._away("start", error) from error

    def logged_iterations(self) -> int:
        """Iterations that have been told completely."""
        try:
            return int(self._client.get_run(self._run).data.tags.get(LOGGED_TAG, "0"))
        except MlflowException as error:
            raise self._away("logged_iterations", error) from error

    def log_iteration(
        self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord], ended_at: float
    ) -> None:
        """Metrics at step ``iteration``, and the trajectories as a dataset input."""
        try:
            self._log_metrics(metrics, iteration, ended_at)
            datasets = [_dataset_input(record) for record in inputs]
            self._client.log_inputs(self._run, datasets=datasets)
            self._client.set_tag(self._run, LOGGED_TAG, str(iteration + 1))
        except MlflowException as error:
            raise self._away(f"iteration {iteration}", error) from error

    def log_evaluation(self, version: int, metrics: Mapping[str, float], ended_at: float) -> None:
        """Metrics at step ``version``."""
        try:
            self._log_metrics(metrics, version, ended_at)
        except MlflowException as error:
            raise self._away(f"evaluation of version {version}", error) from error

    def log_checkpoint(self, record: CheckpointRecord) -> None:
        """A logged model that names where it lies, its parent and its shards; a version of the registered model."""
        try:
            known = self._models(f"name = '{record.name}'")
            model = known[0] if known else self._create_model(record)
            if model.status is not LoggedModelStatus.READY:
                self._complete(model, record)
            if DELETED in model.tags:  # a run that went back to an older checkpoint has made it again
                self._client.delete_logged_model_tag(model.model_id, DELETED)
        except MlflowException as error:
            raise self._away(f"checkpoint {record.version}", error) from error
        if self._registry is not None and record.exported is not None:
            self._registry.register(record.exported, self._run, model.model_id)

    def log_deleted(self, run_url: str, kept: Collection[int]) -> None:
        """A tag on the models whose files are gone."""
        try:
            for model in self._models():
                if int(model.params["policy_version"]) not in kept and DELETED not in model.tags:
                    self._client.set_logged_model_tags(model.model_id, {DELETED: "true"})
        except MlflowException as error:
            raise self._away("deleted checkpoints", error) from error
        if self._registry is not None:
            self._registry.mark_deleted(run_url, kept)

    def log_best(self, record: BestRecord) -> None:
        """The tag ``best`` on its model alone; version, metric and value as tags of the run."""
        if record == self._best:
            return
        try:
            for model in self._models(f"tags.{BEST_TAG} = 'true'"):
                if model.name != record.name:
                    self._client.delete_logged_model_tag(model.model_id, BEST_TAG)
            for model in self._models(f"name = '{record.name}'"):
                self._client.set_logged_model_tags(model.model_id, {BEST_TAG: "true"})
            for name, value in (("version", record.version), ("metric", record.metric), ("value", record.value)):
                self._client.set_tag(self._run, f"rlhf.best_{name}", str(value))
        except MlflowException as error:
            raise self._away(f"best version {record.version}", error) from error
        self._best = record

    def log_report(self, page: str) -> str | None:
        """An artifact of the MLflow run, and the page that shows it."""
        try:
            self._client.log_text(self._run, page, REPORT)
        except MlflowException as error:
            raise self._away("report", error) from error
        return None if self.url is None else f"{self.url}/artifacts/{REPORT}"

    def finish(self, succeeded: bool) -> None:
        """Close the MLflow run."""
        status = RunStatus.FINISHED if succeeded else RunStatus.FAILED
        try:
            self._client.set_terminated(self._run, RunStatus.to_string(status))
        except MlflowException as error:
            raise self._away("finish", error) from error

    def close(self) -> None:
        """Nothing is held."""

    @property
    def url(self) -> str | None:
        """The run's page, where the tracking store is a server."""
        if not is_server(self._uri) or self._run_id is None:
            return None
        return f"{self._uri}/#/experiments/{self._experiment_id}/runs/{self._run_id}"

    @property
    def _run(self) -> str:
        if self._run_id is None:
            raise TrackerError("the MLflow run is not started: call start() first")
        return self._run_id

    def _models(self, *conditions: str) -> list[LoggedModel]:
        """The models of this run that fulfil the conditions."""
        query, models, token = " AND ".join([*conditions, f"source_run_id = '{self._run}'"]), [], None
        while True:
            found = self._client.search_logged_models([self._experiment_id], query, page_token=token)
            models.extend(found)
            token = found.token
            if not token:
                return models

    def _experiment_for(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run made it meanwhile
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _tell_config(self, config: Mapping[str, Any]) -> None:
        params = [Param(key, value[:MAX_PARAM]) for key, value in flatten(config).items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + MAX_PARAMS])
        self._client.log_dict(self._run, dict(config), "config.json")

    def _create_model(self, record: CheckpointRecord) -> LoggedModel:
        model = self._client.create_logged_model(
            self._experiment_id,
            name=record.name,
            source_run_id=self._run,
            model_type="policy",
            params={
                "uri": record.uri,
                "policy_version": str(record.version),
                "parent": record.parent,
                "parents": json.dumps(dict(record.parents), sort_keys=True),
                "weight_digest": record.digest,
            },
            tags={
                "trajectories": "\n".join(record.manifests)[:MAX_TAG],
                "trajectory_manifests": str(len(record.manifests)),
            },
        )
        self._client.log_outputs(self._run, [LoggedModelOutput(model.model_id, record.version)])
        return model

    def _complete(self, model: LoggedModel, record: CheckpointRecord) -> None:
        for name, value in record.metrics.items():
            self._client.log_metric(
                self._run,
                metric_name(name),
                value,
                timestamp=_milliseconds(record.ended_at),
                step=record.version,
                model_id=model.model_id,
            )
        self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)

    def _log_metrics(self, metrics: Mapping[str, float], step: int, ended_at: float) -> None:
        # The time of the event, not of the telling: MLflow keeps a value that it is told twice, at one time, once.
        at = _milliseconds(ended_at)
        self._client.log_batch(
            self._run, metrics=[Metric(metric_name(name), value, at, step) for name, value in sorted(metrics.items())]
        )

    def _away(self, what: str, error: Exception) -> TrackerError:
        return away(self._uri, what, error)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"a": {"b": 1}}`` as ``{"a.b": "1"}``."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _dataset_input(record: DatasetRecord) -> DatasetInput:
    # MLflow resolves sources by scheme and knows no file of ours: a URL that it only has to show fits all of them.
    source = HTTPDatasetSource(record.uri)
    dataset = MetaDataset(source, name=record.name, digest=record.digest[:MAX_DIGEST])
    return DatasetInput(dataset._to_mlflow_entity(), [InputTag("mlflow.data.context", record.context)])
