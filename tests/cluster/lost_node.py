"""A node dies under a run's placement group: what is lost, what ``reserve`` says while there is no other, and then.

    python lost_node.py

prints what it saw as one line of JSON. The cluster, whose nodes are processes of one machine, is this process's own; GPUs are
numbers to Ray.
"""

import json
import os
import time

# Ray finds a silent node within seconds; read when its processes start.
os.environ |= {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
}

import ray
import slot_controller as controllers
from ray.cluster_utils import Cluster

from rlhf_core.errors import DeadlineError


def lost(groups):
    """The processes in slots that do not answer."""
    silent = []
    for name in ("engine-0", "engine-1", "policy-0", "policy-1"):
        try:
            ray.get(controllers.actor_of(groups, name).where.remote(), timeout=5)
        except ray.exceptions.RayError:
            silent.append(name)
    return silent


def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    os.environ["RAY_ADDRESS"] = cluster.address
    cluster.add_node(num_cpus=2, num_gpus=1)
    second = cluster.add_node(num_cpus=2, num_gpus=1)
    groups = controllers.groups_of("run", *controllers.SHARED)
    controllers.started(groups)
    seen = {"before": controllers.table("run")}

    cluster.remove_node(second, allow_graceful=False)
    deadline = time.monotonic() + controllers.SECONDS
    while controllers.table("run")[0][2] == "CREATED" and time.monotonic() < deadline:
        time.sleep(0.2)
    seen["lost"] = lost(groups)
    groups.kill(seen["lost"])
    try:
        groups.reserve(2.0)
    except DeadlineError as error:
        seen["message"] = str(error)

    cluster.add_node(num_cpus=2, num_gpus=1)
    groups.reserve(controllers.SECONDS)
    seen["again"] = {name: place["gpus"] for name, place in controllers.started(groups).items()}
    seen["after"] = controllers.table("run")
    return seen


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
