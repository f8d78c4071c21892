"""What Prometheus gets, over real HTTP."""

import json
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlhf_core.telemetry.exposition import Endpoint, RunMetrics
from rlhf_core.telemetry.families import FAMILIES

LABELS = {"run_id": "first", "pipeline": "sync", "algorithm": "rloo"}


@pytest.fixture
def metrics():
    return RunMetrics(LABELS)


@pytest.fixture
def listen(metrics, tmp_path):
    opened = []

    def make(port=0):
        endpoint = Endpoint.open(metrics, "127.0.0.1", port, tmp_path / "prometheus" / "first.json")
        opened.append(endpoint)
        return endpoint

    yield make
    for endpoint in opened:
        endpoint.close()


def scraped(endpoint):
    """(name, own labels) -> value, with every family that has a name."""
    with urllib.request.urlopen(endpoint.url, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = {}
    for sample in [sample for family in families for sample in family.samples]:
        assert sample.labels.items() >= LABELS.items()
        own = tuple(value for name, value in sample.labels.items() if name not in LABELS)
        samples[(sample.name, *own)] = sample.value
    return {family.name for family in families}, samples


def test_gauges_counters_and_summaries(metrics, listen):
    metrics.set("rlhf_reward_mean", 0.25)
    metrics.set("rlhf_reward_mean", 0.5)
    metrics.add("rlhf_samples_total", 24)
    metrics.add("rlhf_samples_total", 24)
    metrics.observe("rlhf_stage_seconds", 1.5, stage="update")
    metrics.observe("rlhf_stage_seconds", 0.5, stage="update")
    metrics.add("rlhf_stage_active", 1, stage="rollout")

    _, samples = scraped(listen())

    assert samples == {
        ("rlhf_reward_mean",): 0.5,
        ("rlhf_samples_total",): 48,
        ("rlhf_stage_seconds_sum", "update"): 2.0,
        ("rlhf_stage_seconds_count", "update"): 2,
        ("rlhf_stage_active", "rollout"): 1,
    }


def test_every_family_is_told_also_without_a_value(listen):
    names, samples = scraped(listen())

    assert names == {name.removesuffix("_total") for name in FAMILIES}
    assert samples == {}


def test_what_is_gone_is_not_told_any_more(metrics, listen):
    metrics.set("rlhf_engine_requests_running", 3, engine="engine-0")
    metrics.forget("rlhf_engine_requests_running")

    assert scraped(listen())[1] == {}


def test_labels_are_those_of_the_family(metrics):
    with pytest.raises(ValueError, match="engine"):
        metrics.set("rlhf_engine_requests_running", 3)


def test_the_file_says_where_and_goes_with_the_endpoint(listen, tmp_path):
    endpoint = listen()
    file = tmp_path / "prometheus" / "first.json"
    [target] = json.loads(file.read_text())

    assert endpoint.url == f"http://{target['targets'][0]}/metrics"
    endpoint.close()
    assert not file.exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint.url, timeout=2)


def test_two_runs_with_one_port_both_listen(listen, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]

        endpoint = listen(taken)

    assert endpoint.server.server_port != taken
    assert f"port {taken} is taken" in caplog.text


def test_with_a_token_only_who_has_it_is_told(listen, monkeypatch):
    monkeypatch.setenv("RLHF_METRICS_TOKEN", "hush")
    url = listen().url

    for given in ({}, {"Authorization": "Bearer hash"}, {"Authorization": "hush"}):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(url, headers=given), timeout=5)
    asked = urllib.request.Request(url, headers={"Authorization": "Bearer hush"})
    assert urllib.request.urlopen(asked, timeout=5).status == 200


def test_only_metrics_are_there(listen):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(listen().url.replace("/metrics", "/../etc/passwd"), timeout=5)


def test_names_follow_prometheus_conventions():
    for name, family in FAMILIES.items():
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert not name.endswith(("_ms", "_mb", "_gib", "_percent", "_count", "_sum", "_bucket")), name
