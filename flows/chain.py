"""A chain of runs, such as classical RLHF.

::

    chain file ─▶ every stage's configuration checked ─▶ sft ─▶ reward-model ─▶ train ─▶ what came of it, and from what
                                                         └ each a flow run of its own, on the models of those before it

The logs of the runs say where to go on: finished stages are skipped, a broken one is resumed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from prefect import flow, runtime
from prefect.logging import get_run_logger

from flows.dpo import dpo
from flows.identity import named_as_its_run, run_child
from flows.reward_model import reward_model
from flows.sft import sft
from flows.stopping import heeding_signals, stopped, stops_with_its_child
from flows.train import train
from rlhf_core.config import plan_chain
from rlhf_core.errors import RunStoppedError
from tasks.chain import check_chain, is_finished, report_chain, resolve_chain
from tasks.resume import Resume  # noqa: TC001  Prefect reads the annotations
from tasks.run import default_run_id

if TYPE_CHECKING:
    from prefect import Flow

    from flows.stopping import Stopping
    from rlhf_core.config.chain import FlowName
    from rlhf_core.config.chain_plan import ChainedRun

FLOWS: dict[FlowName, Flow[..., Any]] = {"train": train, "sft": sft, "reward-model": reward_model, "dpo": dpo}


@flow(name="rlhf", flow_run_name=named_as_its_run, persist_result=False)
async def chain(
    config: str | dict[str, Any] = "chain_tiny_cpu.yaml",
    overrides: list[str] | None = None,
    chain_id: str | None = None,
    resume: Resume = "if-present",
) -> dict[str, Any]:
    """Run the stages of a chain, one after the other.

    Args:
        config: A file, the name of one in configs/, or the chain itself.
        overrides: section.key=value for every stage, NAME:section.key=value for one.
        chain_id: Names the chain; its runs are called {chain_id}-{stage}. A new one by default. The same id again resumes.
        resume: must - the chain has to exist; never - none of its runs may; if-present - either.
    """
    chain_id = chain_id or default_run_id(str(runtime.flow_run.name), str(runtime.flow_run.id))
    runs = plan_chain(resolve_chain(config, overrides or []), chain_id)
    get_run_logger().info("chain %s: %s", chain_id, ", ".join(run.run_id for run in runs))
    await asyncio.to_thread(check_chain, runs, resume, is_retry=runtime.flow_run.run_count > 1)
    try:
        with heeding_signals() as stopping:
            for run in runs:
                await _carry_out(run, chain_id, stopping)
    except RunStoppedError as error:
        return cast("dict[str, Any]", stopped(error))
    return await report_chain(chain_id, runs)


async def _carry_out(run: ChainedRun, chain_id: str, stopping: Stopping) -> None:
    """Run a stage to its end, if it is not there yet.

    Raises:
        RunStoppedError: the chain was asked to end before.
    """
    if await asyncio.to_thread(is_finished, run):
        get_run_logger().info("stage %s is finished: run %s", run.name, run.run_id)
        return
    ended = f"chain {chain_id} was asked to end, and did in stage {run.name}: the same chain id goes on"
    with stops_with_its_child(stopping, ended):
        await run_child(
            FLOWS[run.flow],
            deployment=run.flow,
            key=f"{chain_id}/{run.name}",
            name=run.run_id,
            parameters={"config": run.config.model_dump(mode="json"), "overrides": [], "run_id": run.run_id},
        )
