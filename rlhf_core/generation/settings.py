"""What an engine is started with: from the configuration to vLLM's arguments and environment. Imports no vLLM."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_core.config import Config

Device = Literal["cpu", "gpu"]

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
CPU_BLOCK_SIZE = 32  # tokens per KV block; the CPU kernels want a multiple of 32, smaller blocks share more prefixes
CPU_BATCHED_TOKENS = 2048  # prompt tokens of one step
IMAGES_OF_AN_EPISODE = 999  # vLLM's own limit: how many an environment may show is bounded by the context
PIXELS_GIB = 1.0  # kept by vLLM in each of its two processes: pixel values of images that other requests show too
WORKER_EXTENSION = "rlhf_core.generation.worker_extension.WeightWorkerExtension"
KV_KEEPING_SCHEDULER = "rlhf_core.generation.kept_kv.kv_keeping_scheduler"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything one engine needs to know."""

    model: str  # a folder or hub id
    dtype: str  # torch's name of it
    max_model_len: int  # tokens, prompt + answer
    max_num_seqs: int
    device: Device
    sync_backend: str  # "shm", "nccl", "ipc"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    cpu_threads: int = 1  # of each worker; with another number the log-probs may differ in the last bits
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    seed: int = 0
    sync_timeout: float = 600.0  # seconds
    request_timeout: float = 1800.0  # seconds
    trust_remote_code: bool = False
    max_images: int = 0  # of one prompt; 0: text only
    sleep_level: int = 0  # of vLLM's sleep mode; 0: the engine never sleeps
    workers_in_ray: bool = False  # the workers are Ray actors in bundles of the engine's placement group (colocated)
    partial_rollout_kv: Literal["recompute", "keep"] = "recompute"  # of requests that a weight update meets in flight
    observed: bool = False  # vLLM counts what it does in each step

    @classmethod
    def from_config(cls, config: Config, model_path: str, device: Device) -> EngineSettings:
        """Settings of every engine of a run; ``model_path`` is the resolved ``actor.model_name_or_path``."""
        vllm = config.vllm
        return cls(
            model=model_path,
            dtype=DTYPES[config.ds.param_dtype if vllm.dtype == "auto" else vllm.dtype],
            max_model_len=config.max_model_len,
            max_num_seqs=vllm.max_num_seqs,
            device=device,
            sync_backend=sync_backend(config, device),
            tensor_parallel_size=vllm.tensor_parallel_size,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            cpu_kv_cache_gib=vllm.cpu_kv_cache_gib,
            cpu_threads=config.run.cpu_threads or _cpu_threads(vllm.num_engines * vllm.tensor_parallel_size),
            enforce_eager=vllm.enforce_eager,
            enable_prefix_caching=vllm.enable_prefix_caching,
            seed=config.train.seed,
            sync_timeout=vllm.sync_timeout,
            request_timeout=vllm.request_timeout,
            trust_remote_code=config.run.trust_remote_code,
            max_images=_max_images(config),
            sleep_level=vllm.sleep_level if vllm.enable_sleep else 0,
            workers_in_ray=workers_in_ray(config, device),
            partial_rollout_kv=config.train.partial_rollout_kv,
            observed=config.logger.prometheus_port is not None,
        )

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's ``AsyncEngineArgs`` (and of its ``LLM``); the weight transfer comes on top."""
        shared = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": self.enable_prefix_caching,
            "seed": self.seed,
            "trust_remote_code": self.trust_remote_code,
            "load_format": "safetensors",  # a .bin file is a pickle, which may run code
            "generation_config": "vllm",  # else the model's own file changes the sampling behind our back
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled: temperature applied
            "disable_log_stats": True,
        }
        images = self._image_arguments() if self.max_images else {}
        keeping = {"scheduler_cls": KV_KEEPING_SCHEDULER} if self.partial_rollout_kv == "keep" else {}
        return shared | images | keeping | (self._cpu_arguments() if self.device == "cpu" else self._gpu_arguments())

    def _image_arguments(self) -> dict[str, Any]:
        return {"limit_mm_per_prompt": {"image": self.max_images, "video": 0}, "mm_processor_cache_gb": PIXELS_GIB}

    def _cpu_arguments(self) -> dict[str, Any]:
        return {
            "enforce_eager": True,  # compiling for CPU costs minutes and a compiler
            "block_size": CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": int(self.cpu_kv_cache_gib * 2**30),
            # A seed per request and chunked prefill together kill vLLM's CPU engine (torch's CPU generator has no
            # offset), so a prompt must fit into one step.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(self.max_model_len, CPU_BATCHED_TOKENS),
            "distributed_executor_backend": "uni" if self.tensor_parallel_size == 1 else "mp",
        }

    def _gpu_arguments(self) -> dict[str, Any]:
        # Named, because in a placement group vLLM would choose Ray for every engine of several GPUs.
        backend = "ray" if self.workers_in_ray else "mp" if self.tensor_parallel_size > 1 else "uni"
        return {
            "enforce_eager": self.enforce_eager,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "distributed_executor_backend": backend,
            "enable_sleep_mode": self.sleep_level > 0,
        }


def _max_images(config: Config) -> int:
    """Of one request: the prompt's, and those that an environment shows later."""
    of_prompt = config.data.max_images_per_prompt
    return of_prompt if of_prompt == 0 or config.execution_mode == "single_turn" else IMAGES_OF_AN_EPISODE


def _cpu_threads(workers: int) -> int:
    """This machine's cores shared by all workers, less one each for the process that feeds it."""
    return max(1, (os.cpu_count() or 1) // workers - 1)


def workers_in_ray(config: Config, device: Device) -> bool:
    """True for engines of several GPUs that share them: one process cannot hold fractions of several (``placement``)."""
    shares = config.train.colocate_all and not config.is_replay
    return device == "gpu" and shares and config.vllm.tensor_parallel_size > 1


def sync_backend(config: Config, device: Device) -> str:
    """How weights reach the engines.

    Raises:
        ConfigError: the backend of the configuration does not exist on this kind of device.
    """
    chosen = config.vllm.sync_backend
    if chosen == "auto":
        return "shm" if device == "cpu" else "ipc" if config.train.colocate_all else "nccl"
    if (chosen == "shm") != (device == "cpu"):
        fitting = "'shm'" if device == "cpu" else "'nccl' or 'ipc'"
        raise ConfigError(f"vllm.sync_backend={chosen!r} does not work on {device}: use {fitting}, or 'auto'")
    return chosen


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that an engine's process needs before it imports vLLM."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device == "gpu":
        # IPC handles are tuples of torch's own types, which vLLM carries to its workers only as pickles.
        insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if settings.sync_backend == "ipc" else {}
        return environment | insecure
    environment |= {
        "OMP_NUM_THREADS": str(settings.cpu_threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads leave the cores to the other processes of the run
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if settings.tensor_parallel_size == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker lives in the engine core: starts faster
    return environment
