"""Options every task shares: nothing is cached by Prefect, because the manifests of the run decide what is done."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE

TASK_OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}
