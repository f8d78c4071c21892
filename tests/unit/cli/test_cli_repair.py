"""A torchvision that does not import for want of its operators does with the shim: in subprocesses too."""

import subprocess
import sys

import pytest

from rlhf_cli.repair import add_shim

pytestmark = pytest.mark.agents

# What torchvision's own _meta_registrations.py does as it is imported: an error where nobody has declared the operators.
FAILING = """
import torch
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, iou_threshold: dets)
"""
START = "import site, sys; site.addsitedir(sys.argv[1]); "  # as Python itself does with the folder of its packages
NESTED = START + "import subprocess; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[2], sys.argv[1]]))"
IMPORT = START + "import torchvision"


@pytest.fixture
def packages(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(FAILING)
    return tmp_path


def run(code, packages):
    return subprocess.run([sys.executable, "-c", code, str(packages), IMPORT], capture_output=True, text=True)


def test_without_the_shim_it_does_not_import(packages):
    assert "operator torchvision::nms does not exist" in run(IMPORT, packages).stderr


@pytest.mark.parametrize("code", [IMPORT, NESTED], ids=["process", "subprocess"])
def test_with_the_shim_it_does(packages, code):
    add_shim(packages)

    assert run(code, packages).returncode == 0


def test_a_process_that_needs_no_torchvision_imports_no_torch_for_it(packages):
    add_shim(packages)

    assert run(START + "sys.exit('torch' in sys.modules)", packages).returncode == 0
