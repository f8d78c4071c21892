"""What makes PyPI's torchvision, built for CUDA's torch, import beside the CPU build: ``python -m rlhf_cli.repair --keep``.

Its import fails for two operators that its compiled half should have declared, and which nothing of image processing calls.
Declaring them first is enough. ``repair`` copies this file beside the installed packages, with a ``.pth`` that runs ``install``
when any Python process of the environment starts, Ray's workers and vLLM's subprocesses included. It costs nothing until
torchvision is imported, and imports nothing but ``sys`` until then.
"""

import sys
from typing import Any

OPERATORS = ("nms", "qnms")
ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareFirst:
    """An import hook that finds nothing, and is asked once: as torchvision is first looked for."""

    library: Any = None  # must live: the declarations go with it

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        DeclareFirst.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in OPERATORS:
            DeclareFirst.library.define(operator + ARGUMENTS)


def install() -> None:
    """Ask this hook before all others."""
    sys.meta_path.insert(0, DeclareFirst())
