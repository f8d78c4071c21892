"""The checker of deployments/: what ships passes, and each broken copy is named with its place."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("check_deployments", ROOT / "tools" / "check_deployments.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)


def shipped(file: str, kind: str) -> dict:
    """One object of the manifests."""
    documents = yaml.safe_load_all((ROOT / "deployments" / "kubernetes" / "base" / file).read_text())
    return next(each for each in documents if each["kind"] == kind)


def put(document: dict, path: str, value: object) -> None:
    """Set the value at a path like spec.containers.0.image."""
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in parents:
        document = document[key]
    document[last] = value


def test_what_ships_passes() -> None:
    assert check.check_manifests(ROOT / "deployments" / "kubernetes") == []
    assert check.check_job_template(ROOT / "deployments" / "work_pools" / "kubernetes.json") == []
    assert check.check_work_pools(ROOT / "deployments" / "prefect.yaml", ROOT) == []
    assert check.check_prefect(ROOT / "deployments" / "prefect.yaml", ROOT) == []
    assert check.check_compose(ROOT / "deployments" / "docker" / "compose.yaml") == []
    assert check.check_observability(ROOT / "deployments" / "docker" / "compose.yaml") == []


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("spec.workerGroupSpecs.0.minReplicas", 5, "gpu: minReplicas=5"),
        ("spec.workerGroupSpecs.0.replicas", "1", "is not of type 'integer'"),
        ("spec.headGroupSpec.serviceType", "LoadBalancer", "'LoadBalancer' is not one of"),
        ("spec.authOptions.mode", "disabled", "'token' was expected"),
        ("spec.workerGroups", [], "'workerGroups' was unexpected"),
        ("spec.headGroupSpec.template.spec.containers.0.images", "rlhf", "'images' was unexpected"),
        ("spec.headGroupSpec.template.spec.volumes", [], "mounts the unknown volume shm"),
    ],
)
def test_a_broken_ray_cluster_is_named(path: str, value: object, named: str) -> None:
    cluster = shipped("ray.yaml", "RayCluster")
    put(cluster, path, value)
    faults = check.check_document(cluster)
    assert any(named in fault and fault.startswith("RayCluster/ray: ") for fault in faults), faults


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("kind", "Deploy", "knows no such kind"),
        ("spec.replicas", "one", "spec.replicas"),
        ("spec.template.spec.containers.0.command", "mlflow", "spec.template.spec.containers.0.command"),
        ("spec.template.spec.containers.0.volumeMounts.0.name", "secrets", "unknown volume secrets"),
    ],
)
def test_a_broken_deployment_is_named(path: str, value: object, named: str) -> None:
    mlflow = shipped("mlflow.yaml", "Deployment")
    put(mlflow, path, value)
    assert any(named in fault for fault in check.check_document(mlflow))


def test_a_broken_job_of_the_work_pool_is_named(tmp_path: Path) -> None:
    template = json.loads((ROOT / "deployments" / "work_pools" / "kubernetes.json").read_text())
    template["variables"]["properties"]["backoff_limit"]["default"] = "never"
    broken = tmp_path / "kubernetes.json"
    broken.write_text(json.dumps(template))
    assert any("spec.backoffLimit" in fault for fault in check.check_job_template(broken))


def test_an_entrypoint_that_does_not_exist_is_named(tmp_path: Path) -> None:
    shipped_file = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    shipped_file["deployments"][0]["entrypoint"] = "flows/train.py:trian"
    broken = tmp_path / "prefect.yaml"
    broken.write_text(yaml.safe_dump(shipped_file))
    assert check.check_prefect(broken, ROOT) == [
        "prefect.yaml: train: entrypoint flows/train.py:trian does not exist",
    ]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("    kubernetes: {base_job_template", "    nomad: {base_job_template", "no work pool of type kubernetes"),
        ("work_pools/docker.json", "work_pools/podman.json", "there is no deployments/work_pools/podman.json"),
    ],
)
def test_a_missing_work_pool_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    broken = tmp_path / "prefect.yaml"
    broken.write_text((ROOT / "deployments" / "prefect.yaml").read_text().replace(old, new))
    (fault,) = check.check_work_pools(broken, ROOT)
    assert named in fault


def test_an_undefined_variable_of_a_template_is_named(tmp_path: Path) -> None:
    template = (ROOT / "deployments" / "work_pools" / "docker.json").read_text()
    folder = tmp_path / "deployments" / "work_pools"
    folder.mkdir(parents=True)
    (folder / "docker.json").write_text(template.replace("{{ image }}", "{{ picture }}"))
    (folder / "kubernetes.json").write_text((ROOT / "deployments" / "work_pools" / "kubernetes.json").read_text())
    faults = check.check_work_pools(ROOT / "deployments" / "prefect.yaml", tmp_path)
    assert faults == ["deployments/work_pools/docker.json: the variable picture is not defined"]


def test_a_deployment_in_another_queue_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "prefect.yaml"
    text = (ROOT / "deployments" / "prefect.yaml").read_text()
    broken.write_text(text.replace("work_queue_name: data", "work_queue_name: children"))
    assert len(check.check_prefect(broken, ROOT)) == 2


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("../grafana/rlhf.json", "../grafana/gone.json", "there is no ../grafana/gone.json"),
        ("/var/lib/grafana/dashboards/rlhf.json", "/srv/rlhf.json", "looked for in /var/lib/grafana/dashboards"),
        ("http://prometheus:9090", "http://127.0.0.1:9090", "which is no service"),
        ("targets:/targets:ro", "targets:/elsewhere:ro", "is not where the worker's runs say"),
        (
            "[targets:/var/lib/rlhf/prometheus]",
            "[other:/var/lib/rlhf/prometheus]",
            "is not where the worker's runs say",
        ),
    ],
)
def test_what_grafana_would_not_find_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    folder = tmp_path / "docker"
    folder.mkdir()
    (tmp_path / "grafana").symlink_to(ROOT / "deployments" / "grafana")
    broken = folder / "compose.yaml"
    text = (ROOT / "deployments" / "docker" / "compose.yaml").read_text()
    broken.write_text(text.replace(old, new))
    assert broken.read_text() != text
    (fault,) = check.check_observability(broken)
    assert named in fault


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('["127.0.0.1:4200:4200"]', '["4200:4200"]', "published beyond loopback"),
        ("condition: service_healthy", "conditions: service_healthy", "docker-compose"),
    ],
)
def test_a_broken_compose_file_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    folder = ROOT / "deployments" / "docker"
    (tmp_path / ".env.example").write_text((folder / ".env.example").read_text())
    broken = tmp_path / "compose.yaml"
    text = (folder / "compose.yaml").read_text()
    broken.write_text(text.replace(old, new))
    assert broken.read_text() != text
    assert any(named in fault for fault in check.check_compose(broken))


def test_a_broken_dockerfile_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "Dockerfile"
    broken.write_text((ROOT / "deployments" / "docker" / "Dockerfile").read_text() + "RUN cd /tmp && sudo true\n")
    (fault,) = check.check_with("hadolint", "--failure-threshold", "warning", broken)
    assert "DL3004" in fault


@pytest.mark.parametrize("missing", ["RAY_ADDRESS", "RAY_AUTH_TOKEN"])
def test_a_flow_run_does_not_start_without_its_cluster(missing: str) -> None:
    environment = {"PATH": os.environ["PATH"], "RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_TOKEN": "token"}
    del environment[missing]
    script = ROOT / "deployments" / "docker" / "flow-run.sh"
    done = subprocess.run([script, "true"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert missing in done.stderr
