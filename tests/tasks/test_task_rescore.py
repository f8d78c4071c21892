"""The flows that score and export saved trajectories: artifacts, tracker, and a second start."""

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from saved_run import save_run

from rlhf_core.lineage.mlflow.client import MlflowClient

RUN = [[("g0", [("12", 1.0), ("a", 0.0)]), ("g1", [("b", 0.5), (None, None)])], [("g2", [("c", 0.2), ("1c", 0.4)])]]


@pytest.fixture
def run(tmp_path):
    return save_run(tmp_path / "runs", RUN, run_id="answers").url


async def artifacts(*keys):
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=list(keys))))
    return {artifact.key: artifact for artifact in found}


async def test_a_rescoring_is_shown_told_and_not_repeated(run, tmp_path, prefect_api, mlflow_uri, monkeypatch):
    from flows.rescore import rescore

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    client = MlflowClient(tracking_uri=mlflow_uri)
    experiment = client.get_experiment_by_name("rlhf")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("rlhf")
    parent = client.create_run(experiment_id, tags={"rlhf.run_id": "answers"}).info.run_id

    counter = tmp_path / "calls"
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def reward_func(queries, prompts, labels, *, answers):\n"
        f"    open({str(counter)!r}, 'a').write('x' * len(answers))\n"
        "    return [float(len(answer)) for answer in answers]\n"
    )
    report = await rescore(run, [str(mine)], moved=2)
    again = await rescore(run, [str(mine)], moved=2)

    assert counter.read_text() == "xxxxx"
    assert {**again, "plot": None} == {**report, "plot": None}
    assert (report["samples"], report["compared"], report["new"]["mean"]) == (6, 5, 1.4)
    shown = await artifacts("answers-rescored", "answers-rescored-moved", "answers-rescored-scatter")
    assert {artifact.type for artifact in shown.values()} == {"table", "image"}
    assert str(shown["answers-rescored-scatter"].data).startswith("data:image/png;base64,")
    [told] = client.search_runs([experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert told.data.metrics["rescore/pearson"] == pytest.approx(report["pearson"])
    assert len(client.get_metric_history(told.info.run_id, "rescore/pearson")) == 1
    assert told.info.status == "FINISHED"
    [folder] = [item.path for item in client.list_artifacts(told.info.run_id) if item.is_dir]
    assert {item.path.rpartition("/")[2] for item in client.list_artifacts(told.info.run_id, folder)} == {
        "moved.json",
        "report.json",
        "scatter.png",
    }
    assert report["tracker"].endswith(told.info.run_id)


async def test_a_tracker_that_is_away_costs_nothing_but_its_page(run, tmp_path, prefect_api, monkeypatch):
    """The reward is the run's own: nothing moves."""
    from flows.rescore import rescore

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    same = tmp_path / "same.py"
    same.write_text(
        "GIVEN = {'12': 1.0, 'a': 0.0, 'b': 0.5, 'c': 0.2, '1c': 0.4}\n"
        "def reward_func(queries, prompts, labels, *, answers): return [GIVEN[answer] for answer in answers]\n"
    )

    report = await rescore(run, [str(same)])

    assert (report["tracker"], report["compared"], report["moved"]) == (None, 5, [])
    assert (report["pearson"], report["order_changed"]) == (pytest.approx(1.0), 0.0)


async def test_an_export_by_the_flow(run, tmp_path, prefect_api, home):
    from flows.export import export

    written = await export(run, "hf", str(tmp_path / "all"))

    assert (written["rows"], written["output"]) == (6, f"file://{tmp_path}/all")
    assert (await artifacts("answers-export-hf"))["answers-export-hf"].type == "table"
