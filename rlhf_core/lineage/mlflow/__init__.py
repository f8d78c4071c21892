"""How MLflow's client behaves here. This package imports it first, because MLflow reads some of it as it is imported."""

import os

os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")  # a server that is away must not hold a run up for minutes
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
