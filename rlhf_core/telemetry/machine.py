"""What the machine says of the run's processes: resident memory, GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as the driver sees it."""

    index: int
    used_bytes: int
    total_bytes: int
    utilization: float  # share of the last moments in which it computed


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process and all below it; None if it is gone. Shared pages count in each of them."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    return sum(filter(None, map(_resident, family)))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def gpus() -> list[Gpu]:
    """All of this machine; none without NVIDIA's driver, or its package ``nvidia-ml-py``."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            try:
                busy = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
            except pynvml.NVMLError:  # a slice of a GPU (MIG) has no such number
                busy = float("nan")
            found.append(Gpu(index, int(memory.used), int(memory.total), busy))
        return found
    finally:
        pynvml.nvmlShutdown()
