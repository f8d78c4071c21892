"""Who may use the servers of the local stack, once that is asked: ``rlhf up --auth``.

::

    $RLHF_HOME/auth/        of the owner alone
      prefect               rlhf:PASSWORD; Prefect's UI asks for this line
      mlflow                the password of MLflow's user `rlhf`, its only one and its administrator
      mlflow.ini            settings of MLflow's auth; mlflow.db: its users; mlflow_forms: the key that guards its forms
      reward                the bearer token of `rlhf serve-reward`
      metrics               the bearer token of the runs' endpoints for Prometheus

Made once: whoever was told them keeps them. A client has them in its environment; the processes of Ray, which run agents and
reward functions, have only the reward servers' token.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from pathlib import Path

USER = "rlhf"
METRICS_TOKEN = "RLHF_METRICS_TOKEN"  # the endpoints of runs ask for it: rlhf_core.telemetry.exposition
REWARD_TOKEN = "RLHF_REWARD_TOKEN"  # the environment variable, for reward.remote_token_env
NOT_FOR_RAY = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", METRICS_TOKEN)
PASSWORD_BYTES = 24
MLFLOW_SETTINGS = """\
[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{database}
admin_username = {user}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""


class CredentialsError(RlhfError, FileNotFoundError):
    """A file with a credential is gone."""


@dataclass(frozen=True)
class Credentials:
    """Those of one stack. ``make`` first."""

    home: Path  # $RLHF_HOME

    def make(self) -> None:
        """Those that do not exist yet."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._write_once(self.prefect_file, f"{USER}:{_password()}")
        for file in (self.mlflow_file, self._forms_file, self._reward_file, self.metrics_file):
            self._write_once(file, _password())
        settings = MLFLOW_SETTINGS.format(database=self._folder / "mlflow.db", user=USER)
        self._write_once(self._mlflow_settings, settings)

    @property
    def prefect_file(self) -> Path:
        """Its text is what Prefect's UI asks for."""
        return self._folder / "prefect"

    @property
    def mlflow_file(self) -> Path:
        """Its text is the password of the user ``rlhf``."""
        return self._folder / "mlflow"

    @property
    def metrics_file(self) -> Path:
        """Its text is the token that Prometheus shows to the endpoints of runs."""
        return self._folder / "metrics"

    @property
    def reward_token(self) -> str:
        """What clients show to a reward server."""
        return _read(self._reward_file)

    @property
    def of_clients(self) -> dict[str, str]:
        """The environment of whoever uses the servers."""
        return {
            "PREFECT_API_AUTH_STRING": _read(self.prefect_file),
            "MLFLOW_TRACKING_USERNAME": USER,
            "MLFLOW_TRACKING_PASSWORD": _read(self.mlflow_file),
            METRICS_TOKEN: _read(self.metrics_file),
            REWARD_TOKEN: self.reward_token,
        }

    def of_server(self, name: str) -> dict[str, str]:
        """What a server's process has in its environment besides, and nobody else."""
        if name == "prefect":
            return {"PREFECT_SERVER_API_AUTH_STRING": _read(self.prefect_file)}
        if name == "mlflow":
            return {
                "MLFLOW_AUTH_CONFIG_PATH": str(self._mlflow_settings),
                "MLFLOW_AUTH_ADMIN_PASSWORD": _read(self.mlflow_file),
                "MLFLOW_FLASK_SERVER_SECRET_KEY": _read(self._forms_file),
            }
        return {}

    def exports(self) -> list[str]:
        """Lines of a shell that make it a client; the secrets themselves stay in their files."""
        return [
            f'export PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(self.prefect_file))})"',
            f"export MLFLOW_TRACKING_USERNAME={USER}",
            f'export MLFLOW_TRACKING_PASSWORD="$(cat {shlex.quote(str(self.mlflow_file))})"',
        ]

    @property
    def _folder(self) -> Path:
        return self.home / "auth"

    @property
    def _reward_file(self) -> Path:
        return self._folder / "reward"

    @property
    def _forms_file(self) -> Path:
        return self._folder / "mlflow_forms"

    @property
    def _mlflow_settings(self) -> Path:
        return self._folder / "mlflow.ini"

    def _write_once(self, file: Path, text: str) -> None:
        if not file.exists():
            write_private(file, text)


def write_private(file: Path, text: str) -> None:
    """A file that only its owner can read, at no moment any other."""
    temporary = file.with_name(f"{file.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(file)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError as error:
        raise CredentialsError(
            f"{file} is gone: put it back; or end the processes of {file.parent.with_name('stack.json')}, and then give "
            "`rlhf up`, which makes others"
        ) from error


def _password() -> str:
    return secrets.token_urlsafe(PASSWORD_BYTES)
