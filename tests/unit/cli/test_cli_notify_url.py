"""The webhook's URL: refused where it is none, and said nowhere."""

import pytest

from rlhf_cli.notify_url import NOTIFY_URL, notify_url
from rlhf_cli.stack import Ports, Stack
from rlhf_core.errors import ConfigError


@pytest.mark.parametrize("environment", [{}, {NOTIFY_URL: ""}])
def test_none(environment):
    assert notify_url(environment) is None


@pytest.mark.parametrize("url", ["https://hooks.example.org/services/T0/B0", "http://127.0.0.1:8065/hooks/x"])
def test_a_url(url):
    assert notify_url({NOTIFY_URL: url}) == url


@pytest.mark.parametrize(
    "url",
    [
        "hooks.example.org/secret",
        "ftp://host/secret",
        "https:///secret",
        "https://[secret",
        "https://host:secret/",
        " ",
    ],
)
def test_what_is_no_url_is_refused_without_saying_it(url):
    with pytest.raises(
        ConfigError, match=f"^{NOTIFY_URL} is not the URL of a webhook .*give https://host/path"
    ) as refused:
        notify_url({NOTIFY_URL: url})

    assert "secret" not in str(refused.value)


def test_up_refuses_it_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTIFY_URL, "hooks.example.org/secret")
    home = tmp_path / "home"

    with pytest.raises(ConfigError, match=NOTIFY_URL):
        Stack(home, tmp_path, Ports()).up(print)

    assert not home.exists()


def test_no_part_of_the_stack_has_it_in_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTIFY_URL, "https://hooks.example.org/secret")
    started = []
    monkeypatch.setattr("rlhf_cli.stack.subprocess.Popen", lambda *_, env, **__: started.append(env) or _Process())
    stack = Stack(tmp_path, tmp_path, Ports())

    for name in ("prefect", "mlflow", "ray", "worker"):
        stack._spawn(name, ["true"])

    assert [NOTIFY_URL in environment for environment in started] == [False] * 4


class _Process:
    pid = 2**22 + 1
