"""vLLM's engine core as a script: all above it (AsyncLLM, tokenizer, parsers, the server) is real, no weights are loaded.

A reply is a list of token ids; one token a step. ``core.replies`` holds them in the order in which requests come; a request
that finds none gets ``core.default``.
"""

import asyncio
from collections import deque

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

EOS = 258


def logprob(token: int) -> float:
    """What the script says for a sampled token."""
    return -(token % 7 + 1) / 8


class ScriptedCore:
    """Stands for ``AsyncMPClient``."""

    def __init__(self):
        self.replies = deque()
        self.default = [104, 105, EOS]
        self.requests = []  # vLLM's EngineCoreRequest, as they came
        self.aborted = []
        self.version = "0"
        self.running = asyncio.Event()
        self.running.set()
        self.pause_after = None  # tokens after which every request waits for ``running``
        self.error = None
        self.resources = type("Resources", (), {"engine_dead": False})()
        self._outputs = asyncio.Queue()
        self._tasks = {}

    def reset(self):
        """Forget a test's script."""
        self.replies.clear()
        self.pause_after = self.error = None
        self.running.set()
        self.version = "3"

    async def add_request_async(self, request):
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        params = request.sampling_params
        reply = list(self.replies.popleft() if self.replies else self.default)[: params.max_tokens]
        self._tasks[request.request_id] = asyncio.create_task(self._speak(request, reply))

    async def _speak(self, request, reply):
        params = request.sampling_params
        ends = {EOS, *(params.stop_token_ids or ())} if not params.ignore_eos else set()
        for place, token in enumerate(reply):
            if self.pause_after is not None and place >= self.pause_after:
                await self.running.wait()
            await asyncio.sleep(0)
            reason = FinishReason.STOP if token in ends else None
            if reason is None and place == len(reply) - 1:
                reason = FinishReason.LENGTH
            stop = token if reason is FinishReason.STOP and token != EOS else None
            output = EngineCoreOutput(request.request_id, [token], finish_reason=reason, stop_reason=stop)
            output.new_logprobs = self._logprobs(token, params.logprobs or 0)
            await self._outputs.put(EngineCoreOutputs(outputs=[output], weight_version=self.version))

    def _logprobs(self, token, more):
        ids = [token, *(t for t in range(97, 99 + more) if t != token)][: more + 1]
        values = np.array([[logprob(t) for t in ids]], dtype=np.float32)
        return LogprobsLists(np.array([ids], dtype=np.int32), values, np.ones(1, dtype=np.int32))

    async def get_output_async(self):
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids):
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self._tasks:
                self._tasks.pop(request_id).cancel()

    # --- the rest of what the engine asks of it

    async def get_supported_tasks_async(self):
        return ("generate",)

    async def collective_rpc_async(self, *args, **kwargs):
        return []

    async def set_weight_version_async(self, version):
        self.version = version

    async def pause_scheduler_async(self, mode, clear_cache):
        pass

    async def resume_scheduler_async(self):
        pass

    async def reset_prefix_cache_async(self, *args, **kwargs):
        return True

    def shutdown(self, timeout=None):
        for task in self._tasks.values():
            task.cancel()
