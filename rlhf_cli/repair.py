"""``python -m rlhf_cli.repair``: the last step of set-up, which mends what pip alone cannot.

vLLM's CPU build pulls torchvision, torchaudio and torchcodec, whose PyPI wheels are built for CUDA's torch. Where torchvision
does not import, every transformers import fails with it: the three are removed. Text models and Idefics3 need none of them.
``--keep`` keeps torchvision, which Qwen-VL needs, and makes it import (``torchvision_shim``); every process that reads images
then takes several seconds longer to start, and image processors use torchvision instead of Pillow.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from rlhf_cli import torchvision_shim
from rlhf_cli.doctor import broken_torchvision

PACKAGES = ("torchvision", "torchaudio", "torchcodec")
SHIM = "rlhf_torchvision_shim"


def main() -> None:
    """Mend the packages if, and only if, they are broken here."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_cli.repair", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep torchvision, for Qwen-VL, and make it import")
    keep = parser.parse_args().keep
    reason = broken_torchvision()
    if reason is None:
        return
    removed = PACKAGES[1:] if keep else PACKAGES
    print(f"torchvision does not import beside this torch ({reason}): removing {', '.join(removed)}")
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *removed], check=True)
    if keep:
        add_shim(Path(sysconfig.get_path("purelib")))
        if (still := broken_torchvision()) is not None:
            raise SystemExit(f"torchvision still does not import ({still}): run without --keep")


def add_shim(packages: Path) -> None:
    """Make every Python process that looks for packages in this folder declare torchvision's operators first."""
    shutil.copyfile(torchvision_shim.__file__, packages / f"{SHIM}.py")
    (packages / f"{SHIM}.pth").write_text(f"import {SHIM}; {SHIM}.install()\n", encoding="utf-8")


if __name__ == "__main__":
    main()
