"""Grafana's dashboard and the endpoint know the same metrics."""

import json
import re
from pathlib import Path

import yaml

from rlhf_core.telemetry.families import FAMILIES

FOLDER = Path(__file__).resolve().parents[3] / "deployments" / "grafana"
DASHBOARD = json.loads((FOLDER / "rlhf.json").read_text())


def names_in(text):
    """Families, without the suffixes of a summary's samples."""
    found = set(re.findall(r"\brlhf_[a-z_]+", text))
    return {name if name in FAMILIES else re.sub(r"_(sum|count)$", "", name) for name in found}


def queries():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_every_metric_is_on_the_dashboard_and_no_other():
    assert names_in("\n".join(queries())) == set(FAMILIES)


def test_panels_filter_by_run_and_do_not_overlap():
    assert [query for query in queries() if query.count("rlhf_") != query.count('run_id=~"$run_id"')] == []
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))


def test_labels_in_legends_are_those_of_the_metrics():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            known = {"run_id"}.union(*(FAMILIES[name].labels for name in names_in(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]


def test_the_scrape_configuration_finds_what_the_runs_write():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())

    [found] = config["scrape_configs"][0]["file_sd_configs"]
    assert found["files"] == ["../../.rlhf/prometheus/*.json"]  # as tasks.watch.target_file


def test_the_documentation_has_every_metric_as_it_is():
    text = (FOLDER.parents[1] / "docs" / "observability.md").read_text()

    documented = dict(re.findall(r"^\| `(rlhf_\w+)` \| (.+) \|$", text, re.MULTILINE))
    assert documented == {
        name: f"{family.kind} | {', '.join(f'`{label}`' for label in family.labels)} | {family.help}"
        for name, family in FAMILIES.items()
    }
