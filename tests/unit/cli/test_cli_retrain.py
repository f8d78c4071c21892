"""``rlhf retrain`` as far as it goes without a training; schedules on a real Prefect server."""

import asyncio
import sys

import pytest
import yaml
from prefect import flow, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.schedules import CronSchedule
from typer.testing import CliRunner

from rlhf_cli import main as cli
from rlhf_cli.schedules import switch, turn_on_again, turned_on
from rlhf_core.errors import ConfigError

TRAINING = """
actor: {model_name_or_path: builtin:tiny}
data: {prompt_dataset: p.jsonl}
reward: {functions: [{use: digits}]}
eval: {dataset: h.jsonl}
run: {device: cpu}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("rlhf_cli.configurations.gpus_of_this_machine", lambda: 0)
    (tmp_path / "training.yaml").write_text(TRAINING)
    (tmp_path / "retraining.yaml").write_text("name: bot\nconfig: training.yaml\n")
    return tmp_path


def fails(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["rlhf", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().err


def test_check_says_what_a_turn_asks_for(place):
    done = CliRunner().invoke(cli.app, ["config", "check", "-c", "retraining.yaml", "vllm.num_engines=2"])

    assert done.stdout.splitlines()[0] == "retraining.yaml: valid; on this machine (cpu):"
    assert "engine-1" in done.stdout


def test_show_gives_the_retraining_with_its_training(place):
    done = CliRunner().invoke(cli.app, ["config", "show", "-c", "retraining.yaml", "margin=0.5", "train.seed=7"])

    tree = yaml.safe_load(done.stdout)
    assert (tree["margin"], tree["config"]["train"]["seed"], tree["config"]["logger"]["mlflow_model"]) == (
        0.5,
        7,
        "bot",
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["retrain"], "name a retraining with -c FILE"),
        (["retrain", "--on", "-c", "retraining.yaml"], "--on and --off are of the deployment's schedule"),
        (["retrain", "-c", "retraining.yaml", "margin=-1"], "margin=-1"),
        (["retrain", "-c", "retraining.yaml", "eval.dataset=[]"], "champion and challenger are compared"),
        (["retrain", "-c", "training.yaml"], "unknown key 'actor'"),
        (["retrain", "-c", "retraining.yaml", "--abandon"], "needs MLflow's model registry"),
    ],
)
def test_a_mistake_starts_nothing(monkeypatch, capsys, place, arguments, problem):
    assert problem in fails(monkeypatch, capsys, *arguments)
    assert not (place / "home").exists()


def test_nothing_to_give_up(monkeypatch, capsys, place):
    arguments = ["retrain", "-c", "retraining.yaml", "--abandon", "logger.mlflow_uri=http://127.0.0.1:9"]

    assert "there is no open turn to give up" in fails(monkeypatch, capsys, *arguments)


# --- schedules


async def deploy(name):
    """As `prefect deploy` does, with a schedule that is paused."""

    @flow(name="schedules")
    def nothing():
        """Never run."""

    async with get_client() as client:
        schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 3 * * *"), active=False, slug="nightly")
        return await client.create_deployment(await client.create_flow(nothing), name=name, schedules=[schedule])


async def is_on(deployment_id):
    async with get_client() as client:
        return [schedule.active for schedule in (await client.read_deployment(deployment_id)).schedules]


async def scheduled(deployment_id):
    """Return once the server has made flow runs for the schedule: it does not with SQLAlchemy 2.1, and says so nowhere."""
    mine = DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id]))
    async with get_client() as client, asyncio.timeout(60):
        while not await client.read_flow_runs(deployment_filter=mine):
            await asyncio.sleep(0.5)


@pytest.mark.stack
async def test_a_schedule_that_was_on_is_on_after_it_was_deployed_again(prefect_api):
    on, off = await deploy("on"), await deploy("off")
    assert await switch("schedules/on", True) == ["cron 0 3 * * *"]
    before = await turned_on()
    assert await deploy("on") == on
    assert (await is_on(on), await is_on(off)) == ([False], [False])

    await turn_on_again(before)

    assert (await is_on(on), await is_on(off)) == ([True], [False])
    await scheduled(on)
    await switch("schedules/on", False)
    assert await is_on(on) == [False]


@pytest.mark.stack
async def test_a_deployment_that_there_is_not(prefect_api):
    with pytest.raises(ConfigError, match="no deployment schedules/gone: deploy it with `rlhf up`"):
        await switch("schedules/gone", True)
