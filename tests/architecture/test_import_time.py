"""Flows and tasks load quickly: Prefect imports them for every flow run, and the UI for every deployment."""

import subprocess
import sys

PROBE = """
import sys
import flows.chain, flows.train, flows.iteration
print(sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'deepspeed', 'transformers', 'mlflow', 'torch'}))
"""


def test_flows_load_without_the_heavy_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)

    assert done.stdout.strip().splitlines()[-1] == "[]"
