"""What the tracker and the registry share of MLflow: its client, and what becomes of its errors."""

from __future__ import annotations

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rlhf_core.lineage.tracker import TrackerError

__all__ = ["MlflowClient", "MlflowException", "TrackerError", "away", "is_server"]


def away(uri: str, what: str, error: Exception) -> TrackerError:
    """An error of MLflow's as ours."""
    return TrackerError(f"MLflow at {uri} did not take {what}: {error}")


def is_server(uri: str) -> bool:
    """True for a tracking server; False for a database that is opened directly."""
    return uri.startswith("http")
