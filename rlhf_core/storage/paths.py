"""The paths of a run, relative to its root: how they are made, and recognised again.

What lies where is drawn in ``run_store``.
"""

from __future__ import annotations

import re

from rlhf_core.records import Stage

ITERATION_NAME = re.compile(r"\d{8,}")
PART_NAME = re.compile(r"(?P<rows>\d+)r-(?P<tokens>\d+)t-(?P<bytes>\d+)b-(?P<sha256>[0-9a-f]{64})\.arrow")
MANIFEST = re.compile(rf"iterations/(?P<iteration>\d{{8,}})/(?P<stage>{'|'.join(Stage)})\.json")
ROUND = re.compile(r"iterations/(?P<iteration>\d{8,})/rounds/(?P<number>\d{2,})\.json")


def stage_folder(iteration: int, stage: Stage) -> str:
    """Where the parts of a stage lie."""
    return f"{iteration_folder(iteration)}/{stage.value}"


def manifest_path(iteration: int, stage: Stage) -> str:
    """Where the manifest of a stage lies."""
    return f"{stage_folder(iteration, stage)}.json"


def round_path(iteration: int, number: int) -> str:
    """Where a round of an iteration is recorded."""
    return f"{iteration_folder(iteration)}/rounds/{number:02d}.json"


def iteration_folder(iteration: int) -> str:
    """Where all of an iteration lies."""
    return f"iterations/{iteration:08d}"


def checkpoint_folder(version: int) -> str:
    """Where the checkpoint of a version lies."""
    return f"checkpoints/{version_name(version)}"


def version_name(version: int) -> str:
    """How a policy version is written in paths."""
    return f"v{version:08d}"
