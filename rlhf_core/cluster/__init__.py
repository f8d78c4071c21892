"""Ray: where the processes of a run live. The only place that imports it."""

import os
import secrets
from urllib.parse import urlsplit

from rlhf_core.config.agent_rules import is_loopback


def _is_here(address: str | None) -> bool:
    """True of a cluster of this process's own, and of one that is named by a loopback address."""
    return address is None or is_loopback(urlsplit(address if "//" in address else f"//{address}").hostname or "")


# Ray reads these once, as it is imported. With no mode set it writes a token into the home folder, and whether a later cluster
# of this machine asks for it depends on who ran first: so the mode is always explicit. A cluster of this process's own gets a
# token that only its processes know.
if "RAY_AUTH_MODE" not in os.environ and "RAY_ADDRESS" not in os.environ:
    os.environ["RAY_AUTH_MODE"] = "token"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray replaces a loopback address by one of a network, and listens on all of them, unless it is told that no other machine will
# join. The name of the variable says which systems it was made for, not where it works.
if _is_here(os.environ.get("RAY_ADDRESS")):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray warns that a future version hides GPUs from actors that ask for none; a colocated engine of several GPUs asks for none,
# and its vLLM workers do.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
