"""Who this process is among the ranks of a training job, and how it joins them."""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch

from rlhf_core.training.meeting import INIT_METHOD

if TYPE_CHECKING:
    from rlhf_core.config.trained import DeepSpeedConfig

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
    sequence_parallel_size: int = (
        1  # neighbours that compute the same rows, each a part of their tokens: see ``sequence_parallel``
    )
    tensor_parallel_size: int = 1  # or each a part of every layer: see ``tensor_parallel``

    def grouped(self, ds: DeepSpeedConfig) -> RankInfo:
        """The same rank, as one of those that share rows."""
        return replace(self, sequence_parallel_size=ds.ranks_per_row, tensor_parallel_size=ds.tensor_parallel_size)

    @property
    def group_size(self) -> int:
        """Neighbours that compute the same rows."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def data_ranks(self) -> int:
        """Groups that rows are spread over."""
        return self.world_size // self.group_size

    @property
    def data_rank(self) -> int:
        """Which of them this rank belongs to."""
        return self.rank // self.group_size

    @property
    def answers(self) -> bool:
        """True for one rank of each group: what all of them know is told, and counted, once."""
        return self.rank % self.group_size == 0

    @property
    def replicas(self) -> int:
        """Ranks that train the same numbers: DeepSpeed takes the mean of their gradients, and ZeRO divides over them."""
        return self.world_size // self.tensor_parallel_size

    @property
    def replica(self) -> int:
        """Which of them this rank is."""
        return self.rank // self.tensor_parallel_size

    def group_budget(self, tokens: int | None) -> int | None:
        """Of a micro-batch of the group, from that of a rank: where layers are divided, each sees all tokens."""
        return None if tokens is None else tokens * self.sequence_parallel_size

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
    deepspeed.init_distributed(
        dist_backend=rank.backend, init_method=INIT_METHOD, timeout=timedelta(seconds=timeout), verbose=False
    )


def _set_environment(rank: RankInfo) -> None:
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_RANK=str(rank.local_rank),
        MASTER_ADDR=rank.master_addr,
        MASTER_PORT=str(rank.master_port),
        DS_ACCELERATOR="cpu" if rank.device == "cpu" else "cuda",
    )
