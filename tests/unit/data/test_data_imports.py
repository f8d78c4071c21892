"""Importing the package loads no heavy library."""

import subprocess
import sys


def test_import_is_light():
    heavy = {"torch", "transformers", "tokenizers", "datasets", "pyarrow"}
    script = f"import sys, rlhf_core.data; print({heavy} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
