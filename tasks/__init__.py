"""Prefect tasks: one hop of the data path each; small references in, small references out."""

from rlhf_core.telemetry import redact_logs

redact_logs()  # Prefect keeps what a run's process logs
