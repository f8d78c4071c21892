"""One vLLM engine: token ids in, token ids and log-probs out, new weights in between.

::

    generate_many ──render images──admit──▶ AsyncLLM ──finished outputs──▶ Mailbox ──▶ chunks of (index, Generation | error)
                     │                                                    everything finished since the last chunk
                     └─ an idle engine is paused while a batch is added, and its prefix cache emptied: all requests of
                        the batch meet in the same steps whatever the timing, so on CPU the same batch gives the same
                        tokens and log-probs bit for bit (stop strings excepted: vLLM ends those between two steps)

    update_weights ──▶ sync.run_round: prepare, pause, load, stamp the version, resume

A plain class: it runs on one event loop, inside an actor or a test. It touches AsyncLLM's internals
(``input_processor``, ``output_processor``, ``engine_core``) here and nowhere else; vLLM is pinned.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from contextlib import aclosing
from contextvars import Context
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DeadlineError, GenerationError, WorkerError
from rlhf_core.generation.batch import Batch, Pending
from rlhf_core.generation.images import EngineImages
from rlhf_core.generation.liveness import while_alive
from rlhf_core.generation.load import EngineLoad, load_keeper
from rlhf_core.generation.results import to_generation
from rlhf_core.generation.sampling import to_sampling_params, token_budget
from rlhf_core.generation.settings import WORKER_EXTENSION, EngineSettings, engine_environment
from rlhf_core.generation.sleeping import NO_WEIGHTS, Sleep
from rlhf_core.generation.sync import run_round
from rlhf_core.records import GenerateRequest, Generation, SamplingParams
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence

    from rlhf_core.generation.batch import Chunk, Outcome
    from rlhf_core.generation.images import ImageLoader
    from rlhf_core.vision import VisionProcessor
    from rlhf_core.weights import WeightUpdate

logger = get_logger(__name__)

LAST_WORDS_SECONDS = 10.0  # how long an engine with damaged weights is given to drop its requests


class VllmEngine:
    """``Generate`` and ``WeightReceiver`` on vLLM's ``AsyncLLM``.

    Args:
        settings: of the engine.
        load_image: an image by its reference, verified; called in threads. Needed with ``settings.max_images``.
    """

    def __init__(self, settings: EngineSettings, load_image: ImageLoader | None = None) -> None:
        self.settings = settings
        self._load_image = load_image
        self._images: EngineImages | None = None  # None: text only
        self._llm: Any = None
        self._eos_ids: frozenset[int] = frozenset()
        self._tasks: Any = ()  # vLLM's name for what the model can do
        self._version = -1
        self._broken = ""  # why nothing may be generated; a complete weight update heals it
        self._sleep = Sleep(settings.sleep_level, settings.device)
        self._gate = asyncio.Lock()  # held while requests are added, and during a weight update
        self._batches = 0
        self._open: list[Batch] = []  # whose requests are not all finished
        self._load = EngineLoad()

    @property
    def version(self) -> int:
        """The policy version that speaks, or would if the engine were awake; ``NO_WEIGHTS`` where it went in its sleep."""
        return NO_WEIGHTS if self._sleep.lost_weights else self._version

    @property
    def load(self) -> EngineLoad:
        """What it has to do right now; without ``settings.observed`` nothing is counted."""
        return self._load

    @property
    def image_processor(self) -> VisionProcessor | None:
        """What reads the images; None if the engine reads text only."""
        return None if self._images is None else self._images.processor

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that are never sampled: placeholders of images. Whatever else asks vLLM must ban them too."""
        return frozenset() if self._images is None else self._images.placeholder_ids

    async def start(self, version: int) -> None:
        """Load the model, whose weights are those of policy ``version``, and answer one request to warm up."""
        os.environ.update(engine_environment(self.settings))
        self._llm = _load(self.settings, self._load)
        self._tasks = await self._llm.get_supported_tasks()
        self._eos_ids = _end_of_sequence_ids(self._llm)
        if self.settings.max_images:
            self._images = await asyncio.to_thread(EngineImages.of, self.settings, self._load_image, self._llm)
        if self.settings.sync_backend == "shm":
            await self.init_weight_transfer({})
        await self._stamp(version)
        warm_up = SamplingParams(max_tokens=2, ignore_eos=True, seed=0)
        await self.generate(GenerateRequest("warm-up", [0, 0, 0, 0], warm_up, affinity=""))
        await self.reset_prefix_cache()
        gc.collect()
        gc.freeze()  # spares the collector the loaded libraries: a quarter of this process's time per token

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``records.Generate``. Joins whatever the engine is doing.

        Raises:
            GenerationError: the request failed.
            DeadlineError: no answer within ``settings.request_timeout``.
            WorkerError: the engine is dead, or holds damaged weights.
        """
        [(_, outcome)] = [pair async for chunk in self._run([request], fresh=False) for pair in chunk]
        if isinstance(outcome, Generation):
            return outcome
        raise outcome

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Chunk]:
        """Sample a batch; each chunk holds all that finished since the last one, every request comes exactly once.

        On CPU the same batch (same order, same seeds) gives the same result bit for bit if the engine was idle and no
        request has stop strings. A failed request never fails the others. Closing the iterator aborts what is open.

        Raises:
            WorkerError: the engine is dead, or holds damaged weights.
        """
        async with aclosing(self._run(requests, fresh=True)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream(
        self, prompt: Any, params: Any, name: str, admitted: Callable[[], None], **options: Any
    ) -> AsyncGenerator[Any]:
        """vLLM's own outputs of one request, for the server in front of this engine. Closing the iterator aborts it.

        Args:
            prompt: what vLLM's renderer made.
            params: vLLM's sampling parameters; with ``flat_logprobs``, log-probs come without the tokens' texts.
            name: under which ``abort`` finds it; unique while it lives.
            admitted: called right before the engine takes it, which a weight update may delay for long: raises if nobody
                waits for it any more.
            options: of vLLM's ``add_request``.

        Raises:
            DeadlineError: nothing came for ``settings.request_timeout``.
            WorkerError: the engine is dead, holds damaged weights, or dropped the request.
        """
        async with self._gate:
            await self.check_health()
            self._sleep.check_awake()
            admitted()
            try:
                queue = await self._llm.add_request(name, prompt, params, **options)
            except BaseException:  # cut off half-way: what the engine has of it by then would be sampled for nobody
                await self.abort(name)
                raise
        if params.flat_logprobs:
            self._leave_tokens_unnamed(queue.request_id)
        finished = False
        try:
            while not finished:
                output = await self._next(queue, name)
                finished = output.finished
                yield output
        finally:
            if not finished and self._llm is not None and not self._llm.errored:
                await self._llm.abort(queue.request_id, internal=True)

    def check_request(self, prompt: Any, params: Any) -> None:
        """Raise vLLM's own error (a ``ValueError``) for a request that the engine would not take."""
        self._llm.input_processor.process_inputs("check", prompt, params, self._tasks)

    async def abort(self, name: str) -> None:
        """End a request of ``stream``; whoever iterates over it gets a last output that says so."""
        if self._llm is not None and not self._llm.errored:
            await self._llm.abort(name)

    @property
    def client(self) -> Any:
        """vLLM's AsyncLLM, whose configuration, tokenizer and renderer the server shares."""
        return self._llm

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        return self._eos_ids

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer once, before the first update (nccl, ipc)."""
        await self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take the weights of another policy version; requests in flight wait and go on with the new ones. An engine that
        sleeps takes them too, and sleeps on without its KV cache.

        Raises:
            WeightSyncError: with the engine's own text. If the old weights are untouched the engine goes on with them;
                else it refuses to generate until an update succeeds.
            DeadlineError: no answer within ``settings.sync_timeout``; the engine refuses to generate, as above.
        """
        async with self._gate:
            try:
                failure = await run_round(
                    self._llm, update, self.settings.sync_timeout, heal=bool(self._broken), sleep=self._sleep
                )
            except BaseException:
                self._break(f"the weight update to version {update.version} was cut off")
                raise
            if failure is None:
                self._version, self._broken, self._sleep.lost_weights = update.version, "", False
                return
            if failure.damaged:
                await self._fall_silent(str(failure.error))
            raise failure.error from failure.cause

    async def abort_requests(self, request_ids: Collection[str]) -> None:
        """End requests of ``generate_many``, by their own ids: whoever still waits for one gets a ``GenerationError``."""
        named = set(request_ids)
        for batch in self._open:
            batch.unwanted |= {index for index, request in enumerate(batch.requests) if request.request_id in named}
            admitted = [pending.internal_id for pending in batch.pending.values() if pending.index in batch.unwanted]
            if admitted:
                await self._llm.abort(admitted, internal=True)

    async def sleep(self) -> None:
        """Give the GPU's memory to others, as ``settings.sleep_level`` says; nothing where the engine sleeps already.

        Raises:
            WorkerError: requests are in flight; or the engine did not fall asleep, and has to be made again.
        """
        async with self._gate:
            in_flight = len(self._llm.output_processor.request_states)
            if in_flight:
                raise WorkerError(
                    f"the engine cannot sleep with {in_flight} requests in flight: wait for them, or drop them first"
                )
            await self._move("fall asleep", self._sleep.begin(self._llm))

    async def wake_up(self) -> None:
        """Take all memory back, where it is away: the engine generates again.

        Raises:
            WorkerError: it did not wake up, and has to be made again.
        """
        async with self._gate:
            await self._move("wake up", self._sleep.wake(self._llm))

    async def drop_requests(self) -> None:
        """End whatever is in flight; whoever still waits for it gets a ``WorkerError``."""
        open_requests = list(self._llm.output_processor.request_states)
        if open_requests:
            self._llm.output_processor.propagate_error(WorkerError("the request was dropped"))
            await self._llm.abort(open_requests, internal=True)

    async def reset_prefix_cache(self) -> None:
        """Forget the KV cache of earlier prompts."""
        await self._llm.reset_prefix_cache()

    async def check_health(self) -> None:
        """Return if the engine can generate.

        Raises:
            WorkerError: why it cannot.
        """
        if self._broken:
            raise WorkerError(f"the engine generates nothing: {self._broken}")
        if self._llm is None or self._llm.errored:
            raise WorkerError("the vLLM engine is not running: it died, was shut down or never started")

    async def shutdown(self) -> None:
        """End vLLM's processes; the engine cannot be used again."""
        llm, self._llm = self._llm, None  # dropped here: AsyncLLM complains if the interpreter's exit deletes it
        if llm is not None:
            llm.shutdown()
            gc.unfreeze()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _next(self, queue: Any, name: str) -> Any:
        limit = self.settings.request_timeout
        late = DeadlineError(
            f"request {name}: the engine said nothing for {limit:g} s; raise vllm.request_timeout if answers may take longer"
        )
        # In an empty context: the loop keeps a cancelled timer, and with it its context, until it would have been due.
        timer = asyncio.get_running_loop().call_later(limit, queue.put, late, context=Context())
        try:
            return queue.get_nowait() or await queue.get()
        except (WorkerError, DeadlineError):
            raise
        except Exception as error:
            raise WorkerError(self._broken or f"the vLLM engine died while generating: {error}") from error
        finally:
            timer.cancel()

    def _leave_tokens_unnamed(self, request_id: str) -> None:
        """vLLM decodes each sampled token a second time, to name it in the log-probs: a third of its work for a token."""
        states = self._llm.output_processor
        parent = states.parent_requests.get(request_id)
        for name in [request_id] if parent is None else list(parent.child_requests):
            if (state := states.request_states.get(name)) is not None:
                state.logprobs_processor.tokenizer = None

    async def _run(self, requests: Sequence[GenerateRequest], *, fresh: bool) -> AsyncGenerator[Chunk]:
        batch = Batch(requests)
        self._open = [*self._open, batch]
        try:
            if self._images is not None:
                await self._render(batch, self._images)
            await self._admit(batch, fresh=fresh)
            if batch.refused:
                yield batch.refused
            while batch.pending:
                outputs = await batch.mailbox.take(self.settings.request_timeout)
                if not outputs:
                    yield self._timed_out(batch)
                    return
                yield [self._finish(batch, output) for output in outputs]
        finally:
            self._open = [other for other in self._open if other is not batch]
            await self._abort(batch)

    async def _admit(self, batch: Batch, *, fresh: bool) -> None:
        async with self._gate:
            await self.check_health()
            self._sleep.check_awake()
            core = self._llm.engine_core
            exclusive = fresh and not self._llm.output_processor.has_unfinished_requests()
            if exclusive:
                # Empty the prefix cache, but for later turns: it holds what they go on from, and when they come depends
                # on their environments in any case.
                clear = not all(request.continues for request in batch.requests)
                await self._ask("pause", core.pause_scheduler_async("keep", clear))
            try:
                await self._add(batch)
            finally:
                if exclusive:
                    await self._ask("resume", core.resume_scheduler_async())

    async def _ask(self, what: str, call: Awaitable[Any]) -> None:
        """Of the engine's core, for no longer than a weight update may take: the next one waits for the answer."""
        limit = self.settings.sync_timeout
        try:
            await asyncio.wait_for(while_alive(self._llm, call), limit)
        except TimeoutError as error:
            self._break(f"it did not {what} within {limit:g} s (vllm.sync_timeout)")
            raise WorkerError(f"the engine did not {what} within {limit:g} s, nor die") from error

    async def _move(self, what: str, call: Awaitable[Any]) -> None:
        """The engine's memory, as ``_ask``. Where vLLM fails, nobody knows what is left where."""
        try:
            await self._ask(what, call)
        except WorkerError:
            raise
        except Exception as error:
            self._break(f"it did not {what}: {error}")
            raise WorkerError(f"the engine did not {what}: {error}") from error

    async def _render(self, batch: Batch, images: EngineImages) -> None:
        """Pixel values of all requests, made before the engine is held up for them."""
        made = await asyncio.gather(*map(images.engine_input, batch.requests), return_exceptions=True)
        for index, (request, engine_input) in enumerate(zip(batch.requests, made, strict=True)):
            if isinstance(engine_input, GenerationError):
                batch.refused.append((index, engine_input))
            elif isinstance(engine_input, _request_errors()):
                refusal = GenerationError(
                    f"request {request.request_id}: the engine refused its images: {engine_input}"
                )
                batch.refused.append((index, refusal))
            elif isinstance(engine_input, BaseException):
                raise engine_input
            else:
                batch.rendered[index] = engine_input

    async def _add(self, batch: Batch) -> None:
        self._batches += 1
        refused = {index for index, _ in batch.refused}
        for index, request in enumerate(batch.requests):
            if index in refused:
                continue
            if index in batch.unwanted:
                batch.refused.append((index, GenerationError(f"request {request.request_id} was taken back")))
                continue
            try:
                budget = token_budget(request, self.settings.max_model_len)
                params = to_sampling_params(request, budget, self._eos_ids, self.banned_ids)
                prompt = batch.rendered.get(index) or _token_prompt(request)
                name = f"{self._batches}-{index}"
                core_request = self._llm.input_processor.process_inputs(name, prompt, params, self._tasks)
            except GenerationError as error:
                batch.refused.append((index, error))
                continue
            except _request_errors() as error:
                refusal = GenerationError(f"request {request.request_id}: the engine refused it: {error}")
                batch.refused.append((index, refusal))
                continue
            self._llm.input_processor.assign_request_id(core_request)
            batch.pending[name] = Pending(index, budget, core_request.request_id)
            self._llm.output_processor.add_request(core_request, None, None, 0, batch.mailbox)
            await self._llm.engine_core.add_request_async(core_request)

    def _finish(self, batch: Batch, output: Any) -> tuple[int, Outcome]:
        if isinstance(output, Exception):
            raise WorkerError(self._broken or f"the vLLM engine died while generating: {output}") from output
        pending = batch.pending.pop(output.request_id)
        try:
            result = to_generation(batch.requests[pending.index], output.outputs[0], pending.budget)
        except GenerationError as error:
            return pending.index, error
        return pending.index, result

    def _timed_out(self, batch: Batch) -> Chunk:
        limit = self.settings.request_timeout
        return [
            (
                pending.index,
                DeadlineError(
                    f"request {batch.requests[pending.index].request_id}: the engine finished nothing for {limit:g} s; "
                    "raise vllm.request_timeout if answers may take longer"
                ),
            )
            for pending in batch.pending.values()
        ]

    async def _abort(self, batch: Batch) -> None:
        """A no-op for a batch that is through."""
        if batch.pending and not self._llm.errored:
            with contextlib.suppress(Exception):  # the batch's own error matters, not that of the clean-up
                await self._llm.abort([pending.internal_id for pending in batch.pending.values()], internal=True)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _stamp(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        self._version = version

    def _break(self, reason: str) -> None:
        """Whoever waits for a request in flight is told: the engine may stay paused until an update succeeds."""
        self._broken = reason
        logger.error("the engine generates nothing until a weight update succeeds: %s", reason)
        self._llm.output_processor.propagate_error(WorkerError(reason))

    async def _fall_silent(self, reason: str) -> None:
        """End what is in flight before the engine goes on: damaged weights must not speak under a version's name."""
        open_requests = list(self._llm.output_processor.request_states)
        self._break(reason)
        with contextlib.suppress(Exception):  # an engine that does not listen cannot speak either
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._llm.abort(open_requests, internal=True)
                await self._llm.resume_generation()


def _load(settings: EngineSettings, load: EngineLoad) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = settings.engine_arguments()
    if settings.sync_backend == "shm":
        arguments["worker_extension_cls"] = WORKER_EXTENSION
    transfer = WeightTransferConfig(backend=settings.sync_backend)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments, weight_transfer_config=transfer),
        stat_loggers=[load_keeper(load)] if settings.observed else None,
    )


def _token_prompt(request: GenerateRequest) -> dict[str, Any]:
    """A request of a model that reads text only.

    Raises:
        GenerationError: it shows images.
    """
    if request.images:
        raise GenerationError(
            f"request {request.request_id} shows {len(request.images)} images, and this engine reads text only: set "
            "data.max_images_per_prompt"
        )
    return {"type": "token", "prompt_token_ids": request.prompt_token_ids}


def _end_of_sequence_ids(llm: Any) -> frozenset[int]:
    """Every id that ends an answer: the tokenizer's, the model's and those of its generation config."""
    found = (
        llm.renderer.get_eos_token_id(),
        getattr(llm.model_config.hf_text_config, "eos_token_id", None),
        llm.input_processor.generation_config_fields.get("eos_token_id"),
    )
    lists = [ids if isinstance(ids, list) else [ids] for ids in found if ids is not None]
    return frozenset(token for ids in lists for token in ids)


def _request_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it cannot take."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError)
