"""vLLM's AsyncLLM as a script: says what it is told, remembers what it was asked, can fail, hang or die."""

import asyncio
from types import SimpleNamespace


class ScriptedLlm:
    """Answers each request at once with ``tokens``, unless ``silent``; ``faults`` maps a call to what it does."""

    def __init__(self, tokens=(11, 2), *, silent=False):
        self.tokens = list(tokens)
        self.silent = silent
        self.errored = False
        self.version = "0"
        self.calls = []
        self.faults = {}
        self.aborted = []
        self.renderer = self.engine_core = self.input_processor = self.output_processor = self
        self.request_states = {}

    # --- requests

    def has_unfinished_requests(self):
        return bool(self.request_states)

    def process_inputs(self, name, prompt, params, tasks):
        if prompt["prompt_token_ids"] == [666]:
            raise ValueError("token id 666 is out of vocabulary")
        return SimpleNamespace(request_id=name, external_req_id=name)

    def assign_request_id(self, request):
        request.request_id += "-internal"

    def add_request(self, request, prompt, parent, index, queue):
        self.request_states[request.request_id] = (request, queue)

    async def add_request_async(self, request):
        self.calls.append("add")
        if not self.silent:
            self.finish(request.request_id)

    def finish(self, internal_id):
        request, queue = self.request_states.pop(internal_id)
        flat = SimpleNamespace(logprobs=[-1.0] * len(self.tokens), token_ids=self.tokens)
        span = SimpleNamespace(start=0, end=len(self.tokens), version=self.version)
        output = SimpleNamespace(
            token_ids=self.tokens, logprobs=flat, finish_reason="stop", stop_reason=None, weight_versions=[span]
        )
        queue.put(SimpleNamespace(request_id=request.external_req_id, outputs=[output]))

    def propagate_error(self, error):
        for _, queue in self.request_states.values():
            queue.put(error)

    async def abort(self, request_ids, internal):
        self.calls.append("abort")
        self.aborted += request_ids
        for request_id in request_ids:
            self.request_states.pop(request_id, None)

    # --- pausing and weights

    async def pause_scheduler_async(self, mode, clear_cache):
        await self._do(f"pause {mode} {clear_cache}")

    async def resume_scheduler_async(self):
        await self._do("resume")

    async def pause_generation(self, mode, clear_cache):
        await self._do("pause_generation")

    async def clear_mm_cache_async(self):
        pass

    async def resume_generation(self):
        await self._do("resume_generation")

    async def collective_rpc(self, method, kwargs):
        await self._do(method)

    async def update_weight_version(self, version):
        await self._do("update_weight_version")
        self.version = version

    # --- sleep

    async def sleep(self, level):
        await self._do(f"sleep {level}")

    async def wake_up(self, tags):
        await self._do(f"wake_up {' '.join(tags)}")

    async def _do(self, name):
        self.calls.append(name)
        fault = self.faults.get(name)
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, asyncio.Event):
            await fault.wait()
        if fault == "hang":
            await asyncio.sleep(3600)
