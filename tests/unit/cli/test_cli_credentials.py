"""Credentials of the stack: made once, read by their owner alone, handed to whom they are for."""

from __future__ import annotations

import os
import shlex
import stat

import pytest
from typer.testing import CliRunner

from rlhf_cli.credentials import NOT_FOR_RAY, Credentials, CredentialsError
from rlhf_cli.main import app
from rlhf_cli.stack import Ports, Stack, StackError


@pytest.fixture
def stack(tmp_path):
    return Stack(tmp_path, tmp_path, Ports())


def test_nobody_else_can_read_a_file(tmp_path):
    Credentials(tmp_path).make()

    assert stat.S_IMODE((tmp_path / "auth").stat().st_mode) == 0o700
    files = list((tmp_path / "auth").iterdir())
    assert len(files) == 6
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_they_stay_the_same_and_differ_from_each_other(tmp_path):
    Credentials(tmp_path).make()
    first = Credentials(tmp_path).of_clients
    Credentials(tmp_path).make()

    assert Credentials(tmp_path).of_clients == first
    assert len({value.removeprefix("rlhf:") for value in first.values()}) == len(first)


def test_servers_and_clients_have_the_same(tmp_path):
    credentials = Credentials(tmp_path)
    credentials.make()

    clients = credentials.of_clients
    assert credentials.of_server("prefect")["PREFECT_SERVER_API_AUTH_STRING"] == clients["PREFECT_API_AUTH_STRING"]
    assert credentials.of_server("mlflow")["MLFLOW_AUTH_ADMIN_PASSWORD"] == clients["MLFLOW_TRACKING_PASSWORD"]
    assert credentials.of_server("ray") == {}


def test_a_file_that_is_gone_is_named_with_the_remedy(stack):
    stack._choose_auth(True)
    stack.credentials.mlflow_file.unlink()

    with pytest.raises(
        CredentialsError, match=r"auth/mlflow is gone: put it back; or end the processes of .*/stack\.json"
    ):
        _ = stack.environment


def test_what_a_person_is_shown_holds_no_secret(tmp_path):
    credentials = Credentials(tmp_path / "it's")
    credentials.home.mkdir()
    credentials.make()

    lines = credentials.exports()

    assert not any(value in line for value in credentials.of_clients.values() if value != "rlhf" for line in lines)
    assert shlex.split(lines[0].partition('"')[2].removesuffix('"'))[1].removesuffix(")") == str(
        credentials.prefect_file
    )


def test_the_switch_is_remembered(stack):
    stack._choose_auth(True)

    assert stack.environment.keys() >= set(NOT_FOR_RAY)
    assert '"auth": true' in (stack.home / "stack.json").read_text()


def test_servers_that_run_do_not_change_their_mind(stack, monkeypatch):
    monkeypatch.setattr(stack, "is_alive", lambda name: name == "mlflow")

    with pytest.raises(StackError, match=r"mlflow run without auth: give `rlhf down`"):
        stack._choose_auth(True)

    assert not stack.auth
    stack._choose_auth(False)
    stack._choose_auth(None)


@pytest.mark.parametrize(
    ("auth", "asked", "expected"),
    [(True, [], "RLHF_REWARD_TOKEN"), (True, ["--token-env", "MINE"], "MINE"), (False, [], None)],
)
def test_a_reward_server_beside_a_stack_with_auth_asks_for_its_token(stack, monkeypatch, auth, asked, expected):
    monkeypatch.setenv("RLHF_HOME", str(stack.home))
    monkeypatch.delenv("RLHF_REWARD_TOKEN", raising=False)
    stack._choose_auth(auth)
    served = {}
    monkeypatch.setattr("rlhf_cli.serve_reward.serve", lambda settings, **told: served.update(told))

    result = CliRunner().invoke(app, ["serve-reward", "some/model", *asked])

    assert result.exit_code == 0, result.output
    assert served["token_env"] == expected
    given = stack.credentials.reward_token if expected == "RLHF_REWARD_TOKEN" else None
    assert os.environ.pop("RLHF_REWARD_TOKEN", None) == given
