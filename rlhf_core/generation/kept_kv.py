"""vLLM's scheduler for ``train.partial_rollout_kv=keep``: new weights leave the KV cache of the requests in flight as it is.

::

    a weight update pauses, then ─▶ reset_prefix_cache(reset_running_requests=True)
        vLLM       every running request is preempted, and computes prompt and answer again with the new weights
        here       one that has spoken goes on with the KV of the old weights; and since whatever it computes from now on
                   attends to that, no other request may ever find one of its blocks:
                       the prefix cache forgets every block      those that were computed so far
                       the request hashes under a name of its own    those that will be

Runs in vLLM's engine core.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class KvKeepingScheduler(Scheduler):  # type: ignore[misc]  # vLLM has no types
    """For engines that sample in step with their scheduler (CPU)."""

    running: list[Any]  # vLLM's requests

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See vLLM's; ``reset_running_requests`` says that the weights change."""
        kept = [request for request in self.running if request.num_output_tokens]
        if not (reset_running_requests and kept):
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        self._begin_anew([request for request in self.running if not request.num_output_tokens])
        self.running = kept
        pool = self.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
        for request in kept:
            _hash_apart(request)
        return not reset_connector or bool(self.reset_connector_cache())

    def _begin_anew(self, requests: list[Any]) -> None:
        """Of a prompt that is still being read nothing is to be kept, and images in its rest will be encoded anew."""
        for request in reversed(requests):  # each goes to the front of the queue
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)


class KvKeepingAsyncScheduler(KvKeepingScheduler, AsyncScheduler):  # type: ignore[misc]
    """For engines whose scheduler runs ahead of the sampling (GPU)."""


def kv_keeping_scheduler(vllm_config: Any, **arguments: Any) -> KvKeepingScheduler:
    """What ``scheduler_cls`` names: the one of the two that vLLM's own choice would be."""
    kind = KvKeepingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else KvKeepingScheduler
    return kind(vllm_config=vllm_config, **arguments)


def _hash_apart(request: Any) -> None:
    request.cache_salt = request.request_id  # goes into the hash of the first block, and so into all behind it
    request.block_hashes.clear()
    request.update_block_hashes()
