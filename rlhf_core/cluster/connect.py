"""The Ray cluster of a process: one that is named, or one of its own."""

from __future__ import annotations

import os
from typing import Any

import ray

from rlhf_core.cluster.placement import Node
from rlhf_core.errors import WorkerError
from rlhf_core.telemetry import get_logger

logger = get_logger(__name__)

# Of a cluster started for one process: log-probs and metrics pass through it, weights and shards do not.
OBJECT_STORE_BYTES = 512 * 2**20


def connect(address: str | None) -> list[Node]:
    """Connect this process to Ray, and say what the cluster has, node by node.

    Args:
        address: of a running cluster; default: $RAY_ADDRESS, else a cluster is started that ends with this process.

    Raises:
        WorkerError: no cluster answers at the address.
    """
    if not ray.is_initialized():
        _connect(address or os.environ.get("RAY_ADDRESS"))
    return [
        Node(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def disconnect() -> None:
    """Leave the cluster; one of this process's own ends. Call before the process exits: later Ray waits for itself."""
    ray.shutdown()


def _connect(address: str | None) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if not address:
        logger.info("starting a Ray cluster that ends with this process")
        # "local": with no address Ray would join whatever cluster runs on this machine.
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **common)
        return
    try:
        ray.init(address=address, **common)
    except (ConnectionError, RuntimeError) as error:
        raise WorkerError(
            f"no Ray cluster at {address}: {error}; start one (`rlhf up`) or unset the address"
        ) from error
