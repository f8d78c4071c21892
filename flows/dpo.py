"""The flow of DPO runs: see ``supervised``."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.identity import named_as_its_run
from flows.supervised import run_supervised
from tasks.resume import Resume  # noqa: TC001  Prefect reads the annotations


@flow(name="rlhf", flow_run_name=named_as_its_run, persist_result=False)
async def dpo(
    config: str | dict[str, Any] = "dpo_tiny_cpu.yaml",
    overrides: list[str] | None = None,
    run_id: str | None = None,
    resume: Resume = "if-present",
) -> dict[str, Any]:
    """Train a policy on preferences, without rewards.

    Args:
        config: A file, the name of one in configs/, or the configuration itself.
        overrides: Keys set on top, as section.key=value.
        run_id: Names the run; a new one by default. The same id again resumes.
        resume: must - the run has to exist; never - it must not; if-present - either.
    """
    return await run_supervised("dpo", config, overrides, run_id, resume)
