"""Checks deployments/ without a cluster or a container engine, as `make check` does: ``python tools/check_deployments.py``.

::

    Kubernetes   every document ─▶ schema of its kind (strict) ─▶ volumes that are mounted exist
                 RayCluster ─▶ its schema below ─▶ each pod template as a PodTemplate ─▶ minReplicas ≤ replicas ≤ maxReplicas
    work pools   those of prefect.yaml ─▶ each variable of a template is defined ─▶ the Job of Kubernetes, with their defaults
    Prefect      each deployment's entrypoint exists; each runs in the one pool, and none in the queue of children
    Compose      with its profiles; Grafana's dashboard lies where its provider looks, and Prometheus finds the worker's runs
    others       hadolint (Dockerfile), docker compose, shellcheck, yamllint: programs of the extra `dev`

What it cannot see: quantities that are no number, images that do not exist, and whatever a running API server refuses.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.34"
POOL_TYPES = ("process", "docker", "kubernetes")
TARGETS = "/var/lib/rlhf/prometheus"  # $RLHF_HOME of the image, and what rlhf_core.telemetry.exposition writes below it
BIN = Path(sys.executable).parent
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


RAY_CLUSTER = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata={"type": "object", "required": ["name"]},
    spec=_closed(
        ["rayVersion", "authOptions", "headGroupSpec"],
        rayVersion={"type": "string"},
        # Token auth is not optional here: Ray runs whatever code it is sent.
        authOptions=_closed(["mode"], mode={"const": "token"}, secretName={"type": "string"}),
        headGroupSpec=_closed(
            ["rayStartParams", "template"],
            serviceType={"enum": ["ClusterIP"]},
            rayStartParams=TEXTS,
            template={"type": "object"},
        ),
        workerGroupSpecs={
            "type": "array",
            "items": _closed(
                ["groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                groupName={"type": "string"},
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                rayStartParams=TEXTS,
                template={"type": "object"},
            ),
        },
    ),
)


def check_document(document: dict[str, Any]) -> list[str]:
    """What is wrong with one Kubernetes object; each line names the object and the place."""
    kind = document.get("kind")
    where = f"{kind}/{document.get('metadata', {}).get('name')}"
    if kind == "Kustomization":
        return []
    if kind == "RayCluster":
        return [f"{where}: {fault}" for fault in _ray_cluster(document)]
    faults = _core(document)
    pod = document.get("spec", {}).get("template", {}).get("spec") if kind != "Secret" else None
    if pod:
        claims = [claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])]
        faults += _mounts(pod, claims)
    return [f"{where}: {fault}" for fault in faults]


def check_manifests(folder: Path) -> list[str]:
    """All Kubernetes files below a folder."""
    faults = []
    for file in sorted(folder.rglob("*.yaml")):
        documents = [each for each in yaml.safe_load_all(file.read_text()) if each]
        faults += [f"{file.name}: {fault}" for each in documents for fault in check_document(each)]
    return faults


def check_job_template(file: Path) -> list[str]:
    """The Job that a Kubernetes work pool makes when no variable is set."""
    template = json.loads(file.read_text())
    properties = template["variables"]["properties"]
    manifest = _filled(template["job_configuration"]["job_manifest"], properties)
    manifest["spec"]["template"]["spec"]["containers"][0]["args"] = ["prefect", "flow-run", "execute"]
    return [f"{file.name}: {fault}" for fault in check_document(manifest)]


def check_work_pools(file: Path, project: Path) -> list[str]:
    """prefect.yaml has a pool of each type, whose template is there and asks for no variable that it does not define."""
    pools, faults = yaml.safe_load(file.read_text())["definitions"]["work_pools"], []
    faults += [f"{file.name}: no work pool of type {kind}" for kind in POOL_TYPES if kind not in pools]
    for kind, pool in pools.items():
        if (named := pool.get("base_job_template")) is None:
            continue
        if not (project / named).is_file():
            faults.append(f"{file.name}: work pool {kind}: there is no {named}")
            continue
        template = json.loads((project / named).read_text())
        asked = set(re.findall(r'"\{\{ (\w+) \}\}"', json.dumps(template["job_configuration"])))
        undefined = sorted(asked - template["variables"]["properties"].keys())
        faults += [f"{named}: the variable {name} is not defined" for name in undefined]
    return faults


def check_prefect(file: Path, project: Path) -> list[str]:
    """Each entrypoint names a function that its file defines, no two deployments have one name, and all have the pool."""
    faults, names = [], set()
    for deployment in yaml.safe_load(file.read_text())["deployments"]:
        pool = deployment.get("work_pool", {})
        if pool.get("name") != "rlhf" or pool.get("work_queue_name") not in ("default", "data"):
            faults.append(
                f"{file.name}: {deployment['name']}: runs start in the queues default and data of the pool rlhf"
            )
        name, (path, _, function) = deployment["name"], deployment["entrypoint"].partition(":")
        source = project / path
        if name in names:
            faults.append(f"{file.name}: two deployments are called {name}")
        names.add(name)
        tree = ast.parse(source.read_text()) if source.is_file() else ast.Module([], [])
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if function not in defined:
            faults.append(f"{file.name}: {name}: entrypoint {path}:{function} does not exist")
    return faults


def check_with(program: str, *arguments: str | Path) -> list[str]:
    """What a program of the environment says, if it fails."""
    command = [str(BIN / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [f"{program}:\n{done.stdout}{done.stderr}"] if done.returncode else []


def check_compose(file: Path) -> list[str]:
    """Schema and references by Compose itself; every published port is one of loopback."""
    every = ("--env-file", file.parent / ".env.example", "--profile", "*", "-f", file)
    faults = check_with("docker-compose", *every, "config", "-q")
    for name, service in yaml.safe_load(file.read_text())["services"].items():
        for port in service.get("ports", []):
            if not re.match(r"127\.0\.0\.1:", str(port)):
                faults.append(f"{file.name}: {name}: port {port} is published beyond loopback: write 127.0.0.1:{port}")
    return faults


def check_observability(file: Path) -> list[str]:
    """What Compose gives Grafana and Prometheus: files that are there, and paths that fit each other."""
    compose = yaml.safe_load(file.read_text())
    configs, services = compose["configs"], compose["services"]
    missing = [
        each["file"] for each in configs.values() if "file" in each and not (file.parent / each["file"]).is_file()
    ]
    if missing:
        return [f"{file.name}: configs: there is no {name}" for name in missing]
    given = {each["source"]: each["target"] for each in services["grafana"]["configs"]}
    text = {name: _text(configs[name], file.parent) for name in (*given, "prometheus")}
    faults = []
    folder = yaml.safe_load(text["grafana_dashboards"])["providers"][0]["options"]["path"]
    if str(Path(given["grafana_dashboard"]).parent) != folder:
        faults.append(
            f"{file.name}: grafana: the dashboard is mounted at {given['grafana_dashboard']}, and looked for in {folder}"
        )
    if "panels" not in json.loads(text["grafana_dashboard"]):
        faults.append(f"{file.name}: grafana: {configs['grafana_dashboard']['file']} is no dashboard")
    source = urlsplit(yaml.safe_load(text["grafana_datasource"])["datasources"][0]["url"]).hostname
    if source not in services:
        faults.append(f"{file.name}: grafana: its data source is {source}, which is no service")
    (pattern,) = yaml.safe_load(text["prometheus"])["scrape_configs"][0]["file_sd_configs"][0]["files"]
    read, written = (_mounted(services[name]) for name in ("prometheus", "worker"))
    if read.get(str(Path(pattern).parent)) is None or read[str(Path(pattern).parent)] != written.get(TARGETS):
        faults.append(
            f"{file.name}: prometheus: {pattern} is not where the worker's runs say that they listen ({TARGETS})"
        )
    return faults


def _text(config: dict[str, str], folder: Path) -> str:
    return config["content"] if "content" in config else (folder / config["file"]).read_text()


def _mounted(service: dict[str, Any]) -> dict[str, str]:
    """Place in the container -> volume."""
    mounts = (mount.split(":") for mount in service.get("volumes", []))
    return {mount[1]: mount[0] for mount in mounts}


def check_all(project: Path) -> list[str]:
    """Everything below deployments/."""
    place = project / "deployments"
    return [
        *check_manifests(place / "kubernetes"),
        *check_job_template(place / "work_pools" / "kubernetes.json"),
        *check_work_pools(place / "prefect.yaml", project),
        *check_prefect(place / "prefect.yaml", project),
        *check_compose(place / "docker" / "compose.yaml"),
        *check_observability(place / "docker" / "compose.yaml"),
        *check_with("hadolint", "--failure-threshold", "warning", place / "docker" / "Dockerfile"),
        *check_with("shellcheck", place / "slurm" / "rlhf.sbatch", place / "docker" / "flow-run.sh"),
        *check_with("yamllint", "--strict", "-d", YAMLLINT, place),
    ]


YAMLLINT = """{extends: default, rules: {document-start: disable, braces: {max-spaces-inside: 1}, line-length: {max: 132},
  indentation: {indent-sequences: consistent}, truthy: {check-keys: false}, comments: {min-spaces-from-content: 1}}}"""


def _core(document: dict[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"Kubernetes {KUBERNETES} knows no such kind: {error}"]
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _ray_cluster(document: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(RAY_CLUSTER)
    faults = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    if faults:
        return faults
    spec = document["spec"]
    groups = {"head": spec["headGroupSpec"]}
    for group in spec.get("workerGroupSpecs", []):
        name, low, now, high = (group[key] for key in ("groupName", "minReplicas", "replicas", "maxReplicas"))
        groups[name] = group
        if not low <= now <= high:
            faults.append(f"{name}: minReplicas={low}, replicas={now}, maxReplicas={high} are not in this order")
    for name, group in groups.items():
        template = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": name},
            "template": group["template"],
        }
        faults += [f"{name}: {fault}" for fault in [*_core(template), *_mounts(group["template"].get("spec", {}), [])]]
    return faults


def _mounts(pod: dict[str, Any], claims: list[str]) -> list[str]:
    known = {volume["name"] for volume in pod.get("volumes", [])} | set(claims)
    return [
        f"container {container['name']} mounts the unknown volume {mount['name']}"
        for container in [*pod.get("containers", []), *pod.get("initContainers", [])]
        for mount in container.get("volumeMounts", [])
        if mount["name"] not in known
    ]


def _filled(value: Any, properties: dict[str, Any]) -> Any:
    """A part of a template with the defaults of its variables; a key whose variable has none is left out, as Prefect does."""
    if isinstance(value, dict):
        filled = {key: _filled(each, properties) for key, each in value.items()}
        return {key: each for key, each in filled.items() if each is not None}
    if isinstance(value, list):
        return [_filled(each, properties) for each in value]
    if isinstance(value, str) and (variable := re.fullmatch(r"\{\{ (\w+) \}\}", value)):
        return properties[variable[1]].get("default")
    return value


if __name__ == "__main__":
    found = check_all(Path(__file__).parents[1])
    print("\n".join(found) or "deployments/: nothing wrong")
    sys.exit(bool(found))
