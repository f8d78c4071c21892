"""``python -m rlhf_cli.repair``: the last step of set-up, which mends what pip alone cannot.

vLLM's CPU build pulls torchvision, torchaudio and torchcodec, whose PyPI wheels are built for CUDA's torch. Where torchvision
does not import, every transformers import fails with it: the three are removed. Text models need none of them.
"""

from __future__ import annotations

import subprocess
import sys

from rlhf_cli.doctor import broken_torchvision

PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    """Remove the packages if, and only if, they are broken here."""
    reason = broken_torchvision()
    if reason is None:
        return
    print(f"removing {', '.join(PACKAGES)}: torchvision does not import beside this torch ({reason})")
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *PACKAGES], check=True)


if __name__ == "__main__":
    main()
