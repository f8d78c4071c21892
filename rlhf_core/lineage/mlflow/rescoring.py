"""A rescoring in MLflow: a run of its own, below the run whose answers were scored again.

An own run, because its numbers are not those of the training: rescorings stand side by side in the runs table, and the state
of the source's run, which may still train, is not touched.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from rlhf_core.lineage.mlflow.client import MlflowException
from rlhf_core.lineage.mlflow.tracker import RUN_TAG, MlflowTracker

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE_TAG = "rlhf.rescored_run_id"
FOLDER_DIGITS = 8


class MlflowRescoring(MlflowTracker):
    """Tells one comparison."""

    def tell(self, body: Mapping[str, Any], scorer: Mapping[str, Any], url: str, plot: bytes, digest: str) -> None:
        """Numbers as metrics, the samples that moved most as a table, the picture; telling it twice changes nothing.

        Args:
            body: of the report.
            scorer: what the new rewards depend on.
            url: where the new rewards lie.
            plot: PNG.
            digest: of the report: another one, of more iterations, is told beside it.

        Raises:
            TrackerError: the server did not take it.
        """
        source, iterations = str(body["run_id"]), body["iterations"]
        self.start(f"{source}/rescored/{body['name']}", scorer, {SOURCE_TAG: source, "rlhf.storage": url})
        folder = f"iterations-{iterations[0]}-{iterations[-1]}-{digest[:FOLDER_DIGITS]}"
        try:
            self._put_below(source)
            self._client.log_dict(self._run, dict(body), f"{folder}/report.json")
            began = self._client.get_run(self._run).info.start_time  # MLflow keeps a value told twice at one time once
            for name, value in metrics_of(body).items():
                self._client.log_metric(self._run, name, value, timestamp=began, step=int(iterations[-1]))
            told = {item.path for item in self._client.list_artifacts(self._run, folder)}
            if f"{folder}/scatter.png" not in told:  # last, so: all of it
                if body["moved"] and f"{folder}/moved.json" not in told:  # a table that is logged again grows
                    self._client.log_table(self._run, _columns(body["moved"]), f"{folder}/moved.json")
                self._put_picture(plot, folder)
        except MlflowException as error:
            raise self._away(f"the rescoring {body['name']} of {source}", error) from error
        self.finish(succeeded=True)

    def _put_below(self, source: str) -> None:
        """Below the source's run, where that was told."""
        parents = self._client.search_runs([self._experiment_id], f"tags.`{RUN_TAG}` = '{source}'", max_results=1)
        if parents:
            self._client.set_tag(self._run, MLFLOW_PARENT_RUN_ID, parents[0].info.run_id)

    def _put_picture(self, plot: bytes, folder: str) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            picture = Path(temporary) / "scatter.png"
            picture.write_bytes(plot)
            self._client.log_artifact(self._run, str(picture), folder)


def metrics_of(body: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a report by name."""
    numbers = {name: body[name] for name in ("samples", "compared", "failed_rollouts", "unscored_in_run", "groups")}
    numbers |= {name: body[name] for name in ("pearson", "spearman")}
    numbers |= {name: body[name] for name in ("advantage_sign_changed", "order_changed", "pairs_swapped")}
    numbers |= {f"{which}_{name}": value for which in ("old", "new") for name, value in body[which].items()}
    numbers["failures"] = sum(body["failures"].values())
    return {f"rescore/{name}": float(value) for name, value in numbers.items() if value is not None}


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as MLflow's tables take them."""
    texts = (str, int, float)
    return {
        name: [row[name] if isinstance(row[name], texts) else json.dumps(row[name]) for row in rows] for name in rows[0]
    }
