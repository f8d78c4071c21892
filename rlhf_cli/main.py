"""The ``rlhf`` command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhf_cli.arguments import (
    OPENRLHF_FLAGS,
    AsJson,
    ConfigFile,
    Overrides,
    Resume,
    Root,
    RunId,
    err,
    out,
)
from rlhf_cli.credentials import REWARD_TOKEN
from rlhf_cli.export import export
from rlhf_cli.garbage import gc
from rlhf_cli.lineage import app as lineage_app
from rlhf_cli.plan import plan
from rlhf_cli.replay import replay
from rlhf_cli.report import report
from rlhf_cli.retrain import retrain
from rlhf_cli.stack import Stack, use_stack
from rlhf_cli.trajectories import trajectories
from rlhf_core.config.chain import FlowName
from rlhf_core.errors import RlhfError, RunStoppedError
from rlhf_core.telemetry import redact_logs

STOPPED = (
    75  # exit code of a run that was asked to end, and goes on when it is started again: EX_TEMPFAIL of sysexits.h
)

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="RL post-training as a workflow.")
config_app = typer.Typer(no_args_is_help=True, help="Look at a configuration.")
app.add_typer(config_app, name="config")
app.add_typer(lineage_app, name="lineage")
app.command()(gc)
app.command()(export)
app.command()(replay)
app.command(context_settings=OPENRLHF_FLAGS)(retrain)
app.command(context_settings=OPENRLHF_FLAGS)(plan)
app.command()(report)
app.command()(trajectories)


@app.command()
def up(
    auth: Annotated[
        bool | None,
        typer.Option("--auth/--no-auth", help="Whether Prefect and MLflow ask for credentials; default: as before."),
    ] = None,
    concurrent_runs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs that may be under way at a time; the next waits. Default: as before, at first 1."
        ),
    ] = None,
) -> None:
    """Start the local stack (Prefect server and worker, MLflow, Ray) and deploy the flows."""
    with out.status("starting the stack"):
        Stack.here().up(lambda line: out.print(line, soft_wrap=True), auth, concurrent_runs)


@app.command()
def down() -> None:
    """Stop the local stack. Runs keep their log: they resume after the next `rlhf up`."""
    stack = Stack.here()
    served = use_stack(stack)
    stack.stop(out.print, "worker")
    if served:
        from rlhf_cli.interrupted import mark_interrupted  # Prefect reads its settings as it is imported

        asyncio.run(mark_interrupted(out.print))
    stack.down(out.print)


@app.command()
def status(as_json: AsJson = False) -> None:
    """What of the local stack answers."""
    stack = Stack.here()
    parts = stack.status()
    if as_json:
        urls = {"prefect_url": stack.prefect_url, "mlflow_url": stack.mlflow_url}
        out.print_json(json.dumps({**parts, **urls, "auth": stack.auth}))
    else:
        for name, answers in parts.items():
            out.print(f"{name:<8} {'up' if answers else 'down'}")
        for line in stack.addresses:
            out.print(line, markup=False, soft_wrap=True)
        for name, value in stack.environment.items():
            if name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
                out.print(f"export {name}={value}", soft_wrap=True)
        for line in stack.credentials.exports() if stack.auth else ():
            out.print(line, markup=False, soft_wrap=True)
    if not all(parts.values()):
        raise typer.Exit(1)


@app.command(context_settings=OPENRLHF_FLAGS)
def train(config: ConfigFile, overrides: Overrides = None, run_id: RunId = None, resume: Resume = "if-present") -> None:
    """Train by rewards, in this process: on the local stack if it is up, else without any server."""
    run_one("train", config, overrides, run_id, resume)


@app.command(context_settings=OPENRLHF_FLAGS)
def sft(config: ConfigFile, overrides: Overrides = None, run_id: RunId = None, resume: Resume = "if-present") -> None:
    """Fine-tune a model on given answers, as `train`."""
    run_one("sft", config, overrides, run_id, resume)


@app.command("reward-model", context_settings=OPENRLHF_FLAGS)
def reward_model(
    config: ConfigFile, overrides: Overrides = None, run_id: RunId = None, resume: Resume = "if-present"
) -> None:
    """Train a reward model on preferences, as `train`."""
    run_one("reward-model", config, overrides, run_id, resume)


@app.command(context_settings=OPENRLHF_FLAGS)
def dpo(config: ConfigFile, overrides: Overrides = None, run_id: RunId = None, resume: Resume = "if-present") -> None:
    """Train a policy on preferences, without rewards (DPO), as `train`."""
    run_one("dpo", config, overrides, run_id, resume)


@app.command(context_settings=OPENRLHF_FLAGS)
def chain(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value; for one stage NAME:section.key=value.")
    ] = None,
    chain_id: Annotated[
        str | None, typer.Option("--chain-id", help="Names the chain; the same id again resumes.")
    ] = None,
    resume: Resume = "if-present",
) -> None:
    """Run the stages of a chain, such as SFT, reward model and PPO, as `train`; show what came of them, and from what."""
    from rlhf_cli.here import fresh_id, run_here
    from rlhf_cli.views import show_chain
    from rlhf_core.config import load_chain_config, plan_chain

    chain_id = chain_id or fresh_id(config)
    plan_chain(load_chain_config(config, overrides or []), chain_id)  # a mistake shows before anything starts
    out.print(f"chain {chain_id}: the same command with --chain-id {chain_id} goes on where it stopped", soft_wrap=True)
    show_chain(out, run_here("chain", config, overrides or [], chain_id, resume))


@app.command(context_settings=OPENRLHF_FLAGS)
def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    run_id: RunId = None,
    flow: Annotated[FlowName, typer.Option("--flow", help="The deployment rlhf/FLOW.")] = "train",
) -> None:
    """Start a run on the local stack's worker, follow it, and show its result. Needs `rlhf up`."""
    if not use_stack(Stack.here()):
        raise RlhfError(f"the local stack is not running: start it with `rlhf up`, or use `rlhf {flow}`")
    from rlhf_cli.launch import launch_and_follow  # Prefect reads its settings as it is imported

    if not asyncio.run(launch_and_follow(out, Stack.here(), flow, config, overrides or [], run_id)):
        raise typer.Exit(1)


@app.command(context_settings=OPENRLHF_FLAGS)
def doctor(
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="Also: its storage, models and data, of a YAML file.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """What is installed, which accelerators there are, what is missing, which servers answer; exit code 1 with a problem."""
    from rlhf_cli.doctor import examine, show
    from rlhf_cli.plan import runs_of

    stack = Stack.here()
    use_stack(stack)
    runs = [] if config is None else list(runs_of(config, overrides or []))
    with redirect_stdout(sys.stderr):  # libraries that are imported may log to it: a warning is no JSON
        examined = examine(stack, runs)
    if as_json:
        out.print_json(json.dumps(examined))
    else:
        show(out, examined)
    if examined["problems"]:
        raise typer.Exit(1)


@app.command("serve-reward")
def serve_reward(
    model: Annotated[str, typer.Argument(help="A reward model: folder, hub id, or run:ID.")],
    host: Annotated[str, typer.Option(help="Other than loopback needs --token-env.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 5000,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with the clients' bearer token.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Texts scored together.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long a batch waits for more texts.")] = 5,
    max_queue: Annotated[int, typer.Option(min=1, help="Texts that may wait; then: 503.")] = 4096,
    max_len: Annotated[int | None, typer.Option(min=1, help="Longest text, tokens; default: the model's own.")] = None,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Texts per forward pass.")] = 8,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Of the weights.")] = "fp32",
    device: Annotated[Literal["auto", "cpu", "gpu"], typer.Option()] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model.")] = False,
    root: Root = None,
) -> None:
    """Serve a trained reward model over HTTP, in OpenRLHF's JSON: reward.remote_url of any number of runs."""
    from rlhf_cli.serve_reward import Limits, ModelSettings, serve

    stack = Stack.here()
    if token_env is None and stack.auth:
        os.environ[REWARD_TOKEN], token_env = stack.credentials.reward_token, REWARD_TOKEN
    served = ModelSettings(model, root, device, dtype, micro_batch_size, max_len, trust_remote_code)
    serve(
        served,
        host=host,
        port=port,
        token_env=token_env,
        limits=Limits(max_batch, max_wait_ms / 1000, max_queue),
        announce=lambda url: out.print(
            f"serving {model} at {url}"
            + (f"\nits clients set reward.remote_token_env={token_env}" if token_env else ""),
            markup=False,
            soft_wrap=True,
        ),
    )


@config_app.command("show", context_settings=OPENRLHF_FLAGS)
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """The whole configuration, defaults included. Of a chain: of each stage, by its name. Of a retraining: with its turn's."""
    import yaml

    from rlhf_cli.configurations import tree_of

    tree = tree_of(config, overrides or [])
    out.print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), markup=False, soft_wrap=True, end="")


@config_app.command("check", context_settings=OPENRLHF_FLAGS)
def config_check(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Draw it for so many nodes instead of your cluster.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0.0, help="CPUs of each node; default: of this machine.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of each node; default: of this machine.")] = None,
) -> None:
    """Refuse what cannot work, and draw where the processes of the run, or of each stage of a chain, will sit."""
    from rlhf_cli.configurations import asked_for, cluster_of, loaded
    from rlhf_cli.slot_table import cluster_line

    for name, checked in loaded(config, overrides or []):
        cluster, there = cluster_of(checked, nodes, cpus, gpus)
        device, lines = asked_for(checked, there)
        stage = f"stage {name}: " if name else ""
        out.print(f"{config}: {stage}valid; on {cluster} ({device}):", markup=False, soft_wrap=True)
        for line in (cluster_line(there), *lines):
            out.print(f"  {line}", markup=False, soft_wrap=True)


def run_one(flow: FlowName, config: str, overrides: list[str] | None, run_id: str | None, resume: str) -> None:
    """Run a run's flow in this process, and print its result."""
    from rlhf_cli.configurations import load_for
    from rlhf_cli.here import run_here

    load_for(flow, config, overrides or [])  # a mistake shows before anything starts
    out.print_json(json.dumps(run_here(flow, config, overrides or [], run_id, resume)))


def main() -> None:
    """Entry point: errors of ours are one message, not a traceback."""
    redact_logs()
    sys.path.insert(0, str(Path.cwd()))  # reward and task files of the project are imported by the name they have here
    try:
        app()
    except RlhfError as error:
        err.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
        err.print(str(error), markup=False, soft_wrap=True)
        sys.exit(STOPPED if isinstance(error, RunStoppedError) else 1)
