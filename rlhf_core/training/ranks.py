"""Who this process is among the ranks of a training job, and how it joins them."""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

DEFAULT_THREADS = 1  # ranks share the cores of a CPU box; more threads than cores cost a factor of 3-4


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a training job: one process, one device."""

    rank: int
    world_size: int
    local_rank: int  # index of its GPU among those the process sees; without meaning on CPU
    master_addr: str
    master_port: int
    device: Literal["cpu", "gpu"]
    num_threads: int | None = None  # torch threads on CPU; default: $OMP_NUM_THREADS, else 1

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", self.local_rank)

    def peak_memory_gib(self) -> float:
        """The most memory this process has held: of its GPU, or of the host on CPU."""
        if self.device == "gpu":
            return float(torch.cuda.max_memory_allocated(self.torch_device)) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    @property
    def backend(self) -> str:
        """The collectives' library."""
        return "gloo" if self.device == "cpu" else "nccl"


def init_distributed(rank: RankInfo, timeout: float, deterministic: bool = False) -> None:
    """Join the other ranks. Call once per process, before anything else of this package.

    Args:
        rank: who this process is.
        timeout: seconds after which a collective that other ranks do not join is an error.
        deterministic: bit-reproducible kernels on GPU; those of the CPU always are.
    """
    _set_environment(rank)
    torch.set_num_threads(rank.num_threads or int(os.environ.get("OMP_NUM_THREADS", DEFAULT_THREADS)))
    if rank.device == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Muon's kernels would be compiled: a minute for nothing
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by torch, read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    if rank.device == "gpu":
        torch.cuda.set_device(rank.torch_device)

    import deepspeed  # reads the environment as it is imported

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Else DeepSpeed compiles it at the first start (a minute), for an inference collective that nothing here calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=rank.backend, timeout=timedelta(seconds=timeout), verbose=False)


def _set_environment(rank: RankInfo) -> None:
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        MASTER_ADDR=rank.master_addr,
        MASTER_PORT=str(rank.master_port),
        DS_ACCELERATOR="cpu" if rank.device == "cpu" else "cuda",
    )
