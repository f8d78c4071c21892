"""A chain on a real Prefect server and real logs; its stages train nothing, they write what a run leaves behind.

sft ─▶ reward ─▶ ppo          each one iteration of two optimizer steps
"""

import asyncio
import json
import os
import signal
from typing import Any

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.exceptions import CancelledRun

from flows import chain as chain_flow
from flows.stopping import heeding_signals, stopped
from rlhf_core.cluster.placement import Node
from rlhf_core.config import parse_config, parse_supervised_config
from rlhf_core.data import models_of, supervised_models_of
from rlhf_core.errors import ConfigError, RunStoppedError
from rlhf_core.records import Stage, StageManifest
from rlhf_core.storage import RunStore
from tasks import chain as chain_tasks
from tasks.chain import METHODS

pytestmark = pytest.mark.stack

SUPERVISED = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "pairs.jsonl"}}
BY_REWARDS = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"model_name_or_path": "m"},
    "run": {"device": "cpu"},
}
STAGES = [
    {"name": "sft", "flow": "sft", "config": {**SUPERVISED, "data": {"dataset": "answers.jsonl"}}},
    {
        "name": "reward",
        "flow": "reward-model",
        "config": SUPERVISED,
        "overrides": ["model.model_name_or_path=run:{sft}"],
    },
    {
        "name": "ppo",
        "flow": "train",
        "config": BY_REWARDS,
        "overrides": ["actor.model_name_or_path=run:{sft}", "reward.model_name_or_path=run:{reward}"],
    },
]

ran: list[str] = []
breaks: list[str] = []  # runs that fail after they have begun, once for each entry
stops: list[str] = []  # runs in which their process is asked to end, once for each entry


def scripted(name):
    """A flow that does what ``rlhf/name`` would leave in the log."""

    @flow(name="rlhf", persist_result=False)
    async def stage(config: dict, overrides: list | None = None, run_id: str = "", resume: str = "if-present") -> Any:
        ran.append(run_id)
        method = METHODS.get(name)
        checked = parse_supervised_config(config) if method else parse_config(config)
        store = RunStore(run_id, checked.storage.root)
        if store.read_run() is None:
            names = supervised_models_of(checked, method) if method else models_of(checked)
            store.write_run(
                {
                    "kind": method or "rlhf",
                    "created_at": "2026-01-01T00:00:00+00:00",
                    "config": config,
                    "plan": {"fingerprint": f"of-{name}"},
                    "models": {role: pinned(store, spec) for role, spec in names.items()},
                }
            )
        if run_id in breaks:
            breaks.remove(run_id)
            raise RuntimeError(f"{run_id} fails on purpose")
        if run_id in stops:
            stops.remove(run_id)
            with heeding_signals() as stopping:
                os.kill(os.getpid(), signal.SIGUSR1)
                while not stopping.asked:
                    await asyncio.sleep(0.01)
            return stopped(RunStoppedError(f"run {run_id} was asked to end"))
        metrics = {"reward/mean": 0.5} if name == "train" else {"train/loss": 2.0}
        body = {"seconds": 1.0, "optimizer_steps": 2, "metrics": metrics}
        store.commit(StageManifest(run_id, 0, Stage.UPDATE, (), 0, 0, 0, body=body))
        for version in (0, 1) if name == "reward-model" else ():
            store.write_evaluation(version, {"version": version, "metrics": {"eval/accuracy": 0.5 + version / 4}})
        store.write_end(1)
        return None

    return stage


def pinned(user, spec):
    if not spec.startswith("run:"):
        return {"spec": spec}
    run_id = spec.removeprefix("run:")
    url = f"{user.root}/{run_id}/checkpoints/v00000001"
    return {"spec": spec, "run": run_id, "version": 1, "digest": "d", "url": url}


@pytest.fixture(autouse=True)
def _stages(monkeypatch):
    ran.clear()
    breaks.clear()
    stops.clear()
    monkeypatch.setattr(chain_flow, "FLOWS", {name: scripted(name) for name in chain_flow.FLOWS})
    monkeypatch.setattr(chain_tasks, "connect", lambda address: [Node("here", 2, 0)])


@pytest.fixture
def common(tmp_path):
    return [f"storage.root={tmp_path}"]


async def go(common, chain_id, *overrides, stages=STAGES, resume="if-present"):
    return await chain_flow.chain({"common": common, "stages": stages}, list(overrides), chain_id, resume)


async def test_the_stages_run_in_order_and_the_result_says_what_came_of_them(prefect_api, common, tmp_path) -> None:
    result = await go(common, "whole")

    assert ran == ["whole-sft", "whole-reward", "whole-ppo"]
    sft, reward, ppo = result["stages"]
    assert (sft["stage"], sft["run_id"], sft["version"], sft["optimizer_steps"]) == ("sft", "whole-sft", 1, 2)
    assert sft["storage"] == RunStore("whole-sft", str(tmp_path)).url
    assert sft["headlines"] == ({"metric": "train/loss", "first": 2.0, "last": 2.0},)
    assert reward["headlines"] == ({"metric": "eval/accuracy", "first": 0.5, "last": 0.75},)
    assert ppo["headlines"] == ({"metric": "reward/mean", "first": 0.5, "last": 0.5},)


async def test_the_final_policy_goes_back_to_the_preferences(prefect_api, common) -> None:
    result = await go(common, "lineage")

    assert result["lineage"] == [
        "lineage-ppo: trained by rewards on prompts.jsonl (fingerprint of-train)",
        "├─ policy: version 1 of lineage-sft: SFT on answers.jsonl (fingerprint of-sft)",
        "│  └─ policy: builtin:tiny",
        "└─ reward: version 1 of lineage-reward: reward model on pairs.jsonl (fingerprint of-reward-mo)",
        "   └─ policy: version 1 of lineage-sft, see above",
    ]


async def test_the_artifact_shows_both(prefect_api, common) -> None:
    await go(common, "shown")

    async with get_client() as client:
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["shown-chain"]))
        [artifact] = await client.read_artifacts(artifact_filter=key)
    lines = artifact.data.splitlines()
    assert "| reward | shown-reward | 1 | 2 | eval/accuracy | 0.5 | 0.75 |" in lines
    assert "└─ reward: version 1 of shown-reward: reward model on pairs.jsonl (fingerprint of-reward-mo)" in lines


async def test_a_chain_that_is_asked_to_end_stops_with_its_stage_and_goes_on_there(prefect_api, common) -> None:
    stops.append("asked-reward")
    with pytest.raises(CancelledRun, match="chain asked was asked to end, and did in stage reward: the same chain id"):
        await go(common, "asked")
    assert ran == ["asked-sft", "asked-reward"]

    result = await go(common, "asked", resume="must")

    assert ran == ["asked-sft", "asked-reward", "asked-reward", "asked-ppo"]
    assert [stage["version"] for stage in result["stages"]] == [1, 1, 1]


async def test_a_chain_that_broke_goes_on_with_the_stage_that_broke(prefect_api, common) -> None:
    breaks.append("broken-reward")
    with pytest.raises(RuntimeError, match="on purpose"):
        await go(common, "broken")

    result = await go(common, "broken", resume="must")

    assert ran == ["broken-sft", "broken-reward", "broken-reward", "broken-ppo"]
    assert [stage["run_id"] for stage in result["stages"]] == ["broken-sft", "broken-reward", "broken-ppo"]


async def test_a_finished_chain_runs_nothing_and_tells_the_same(prefect_api, common) -> None:
    first = await go(common, "twice")

    assert await go(common, "twice") == first
    assert len(ran) == 3


async def test_the_retry_of_a_chain_may_go_on_where_nothing_may_exist(prefect_api, common) -> None:
    breaks.append("retried-reward")
    retried = chain_flow.chain.with_options(retries=1, retry_delay_seconds=0)

    await retried({"common": common, "stages": STAGES}, [], "retried", "never")

    assert ran == ["retried-sft", "retried-reward", "retried-reward", "retried-ppo"]


async def test_a_mistake_in_the_last_stage_shows_before_the_first(prefect_api, common) -> None:
    with pytest.raises(ConfigError, match=r"stages.2 \(ppo\).*\n.*rollout.batch_size=0"):
        await go(common, "mistake", "ppo:rollout.batch_size=0")

    assert ran == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("ppo:ref.model_name_or_path=run:gone", r"stage ppo: run:gone: there is no run at"),
        ("ppo:run.device=gpu", r"stage ppo: the run needs \d GPUs"),
        (
            "ppo:algo.advantage.estimator=gone.py:mine",
            r"stage ppo: algo.advantage.estimator='gone.py:mine': no such file",
        ),
        ("ppo:reward.functions=[{use: gone.py}]", r"stage ppo: reward.functions\[0\].use='gone.py'"),
        ("ppo:run.ray_address=host:1", r"the stages name several clusters, run.ray_address=.*: set one in common"),
    ],
)
async def test_what_the_last_stage_needs_is_looked_for_before_the_first(prefect_api, common, override, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        await go(common, "needs", override, "ppo:algo.kl.init_coef=0.1")

    assert ran == []


async def test_a_finished_stage_with_another_configuration_is_refused(prefect_api, common) -> None:
    await go(common, "changed")

    with pytest.raises(ConfigError, match=r"stage sft: .*model.adam.lr: 1e-06 in the run, 0.5 now"):
        await go(common, "changed", "sft:model.adam.lr=0.5")


async def test_a_stage_with_another_flow_is_refused(prefect_api, common) -> None:
    await go(common, "kinds", stages=STAGES[:1])

    with pytest.raises(ConfigError, match=r"stage sft: .*is a run of kind 'sft', not 'dpo'"):
        await go(common, "kinds", stages=[{**STAGES[0], "flow": "dpo"}])


async def test_a_chain_that_must_exist(prefect_api, common) -> None:
    with pytest.raises(ConfigError, match=r"stage sft: resume=must, but there is no run at .*none-sft"):
        await go(common, "none", resume="must")


async def test_a_chain_that_must_not_exist(prefect_api, common) -> None:
    await go(common, "there", stages=STAGES[:2])

    with pytest.raises(ConfigError, match=r"stage sft: resume=never.*\nstage reward: resume=never"):
        await go(common, "there", resume="never")


async def test_each_stage_is_a_run_of_its_own_deployment_below_the_chain(prefect_api, common) -> None:
    """All flows have one name, so a deployment is found by its own."""
    async with get_client() as client:
        deployments = {
            name: await client.create_deployment(
                await client.create_flow(function), name=name, entrypoint="flows/x.py:x"
            )
            for name, function in chain_flow.FLOWS.items()
        }
        try:
            await go(common, "deployed")
            runs = {run.name: run for run in await client.read_flow_runs(limit=200)}
            parents = [await client.read_task_run(runs[f"deployed-{s}"].parent_task_run_id) for s in ("sft", "ppo")]
            chains = [run for run in runs.values() if json.dumps(run.parameters).find('"deployed"') > 0]
        finally:
            for deployment in deployments.values():
                await client.delete_deployment(deployment)

    found = {name: runs[f"deployed-{name}"] for name in ("sft", "reward", "ppo")}
    assert [run.deployment_id for run in found.values()] == [
        deployments["sft"],
        deployments["reward-model"],
        deployments["train"],
    ]
    assert {run.state.name for run in found.values()} == {"Completed"}
    assert {parent.flow_run_id for parent in parents} == {chains[0].id}
