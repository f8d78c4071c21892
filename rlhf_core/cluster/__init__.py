"""Ray: where the processes of a run live. The only place that imports it."""

import os
import secrets

# Ray reads these once, as it is imported. With no mode set it writes a token into the home folder, and whether a later cluster
# of this machine asks for it depends on who ran first: so the mode is always explicit. A cluster of this process's own gets a
# token that only its processes know.
if "RAY_AUTH_MODE" not in os.environ and "RAY_ADDRESS" not in os.environ:
    os.environ["RAY_AUTH_MODE"] = "token"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray warns that a future version hides GPUs from tasks that ask for none; nothing of ours relies on either.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
