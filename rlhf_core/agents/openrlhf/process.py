"""The process of a user's executor in OpenRLHF's style: an engine that asks this process's parent, and the executor at work.

A method of the instance returns when the executor has asked for something, or has ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.answers import plain_logs
from rlhf_core.agents.environment.base import InProcess, awaited
from rlhf_core.agents.environment.instance import Instance, called_with
from rlhf_core.agents.environment.sampling import TRAINERS, TurnSampling
from rlhf_core.agents.episode import Episode, TurnLimits
from rlhf_core.agents.multi_turn.executor import METRIC, MultiTurnAgentExecutor
from rlhf_core.errors import AgentError
from rlhf_core.processes.values import shown
from rlhf_core.records import Generation, Prompt, SamplingParams, StopReason, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.agents.episode import Tokenizer
    from rlhf_core.agents.executor import AgentExecutorBase
    from rlhf_core.records import GenerateRequest, Trajectory

# Keys of what ``execute`` returns that are read, besides ``extra_logs``.
PLAIN = ("observation_tokens", "action_ranges", "rollout_log_probs", "reward", "scores", "truncated")


@dataclass
class Logprob:
    """As vLLM has it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """As vLLM has it."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]  # one entry a token: itself
    text: str
    finish_reason: str  # "stop" or "length"
    stop_reason: Any = None
    index: int = 0


@dataclass
class RequestOutput:
    """As vLLM has it."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class ParentEngine:
    """``llm_engine``: what is asked of it travels to the parent process."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.payload = payload
        self.asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0
        self._version: int | None = None
        self.generate = _Remote(self._generate)
        self.get_weight_version = _Remote(self._get_weight_version)

    def resolve(self, answer: dict[str, Any]) -> None:
        """An answer came."""
        waiting = self._waiting.pop(answer["id"])
        if not waiting.done():
            waiting.set_result(answer)

    async def _generate(
        self, prompt_token_ids: Any, sampling_params: Any = None, multi_modal_data: Any = None, **named: Any
    ) -> RequestOutput:
        """One completion. ``AgentError`` if no token is left, or it is asked for what the trainer does not allow."""
        if multi_modal_data and not self.payload.get("images"):
            raise AgentError("llm_engine.generate was given multi_modal_data: images come by the prompt or by step()")
        prompt = list(prompt_token_ids.tolist() if hasattr(prompt_token_ids, "tolist") else prompt_token_ids)
        call_id, self._calls = self._calls, self._calls + 1
        settings = {} if sampling_params is None else dict(vars(sampling_params))
        self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait({"id": call_id, "prompt_token_ids": prompt, "sampling": settings})
        answer = await self._waiting[call_id]
        if "error" in answer:
            raise AgentError(f"llm_engine.generate: {answer['error']}")
        self._version = answer["version"]
        logprobs = [
            {token: Logprob(value)} for token, value in zip(answer["token_ids"], answer["logprobs"], strict=True)
        ]
        completion = CompletionOutput(
            answer["token_ids"], logprobs, answer["text"], answer["finish_reason"], answer["stop_reason"]
        )
        return RequestOutput(prompt, [completion])

    async def _get_weight_version(self) -> int | None:
        """The policy version that spoke last; None before it spoke."""
        return self._version


class _Remote:
    """A method that may also be called as ``method.remote(...)``, as on a Ray actor."""

    def __init__(self, method: Any) -> None:
        self.remote = method

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.remote(*arguments, **named)


class ExecutorInstance:
    """The methods that the parent calls: JSON in, JSON out."""

    def __init__(self, executor: type[AgentExecutorBase], tokenizer: Tokenizer, args: Mapping[str, Any]) -> None:
        self._class = executor
        self._tokenizer = tokenizer
        self._args = args
        self._engine: ParentEngine | None = None
        self._task: asyncio.Task[Any] | None = None

    async def begin(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Start the executor on an episode; what it asks first, or its result."""
        self._engine = ParentEngine(payload)
        self._task = asyncio.create_task(self._run(self._engine, payload))
        return await self._next()

    async def go_on(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Give it the answers; what it asks next, or its result."""
        assert self._engine is not None, "begin() comes first"
        for answer in payload["answers"]:
            self._engine.resolve(answer)
        return await self._next()

    async def close(self, payload: dict[str, Any]) -> None:
        """End an executor that still runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _next(self) -> dict[str, Any]:
        assert self._engine is not None
        assert self._task is not None
        asked = asyncio.ensure_future(self._engine.asked.get())
        await asyncio.wait([asked, self._task], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            found = [asked.result()]
            while not self._engine.asked.empty():
                found.append(self._engine.asked.get_nowait())
            return {"asked": found}
        asked.cancel()
        return {"result": plain_result(self._task.result())}

    async def _run(self, engine: ParentEngine, payload: dict[str, Any]) -> Any:
        offered = {
            "prompt": payload["prompt"],
            "label": payload["label"],
            "sampling_params": TurnSampling(**payload["sampling"]),
            "max_length": payload["max_len"],
            "hf_tokenizer": self._tokenizer,
            "llm_engine": engine,
            "images": None,
        }
        made = make_executor(self._class, offered | {"max_steps": payload["max_turns"]})
        made.playing = Playing(self._tokenizer, engine, self._args)
        return await awaited(made.execute(**called_with(made.execute, offered)))


@dataclass(frozen=True)
class Playing:
    """What ``super().execute`` of an executor goes on with."""

    tokenizer: Tokenizer
    engine: ParentEngine
    args: Mapping[str, Any]  # agent.args


class OpenRlhfLoop(MultiTurnAgentExecutor):
    """What OpenRLHF's own base classes do: stands behind a user's executor in the order of its base classes."""

    playing: Playing

    def __init__(self, agent_instance_cls: type[Any] | None = None, *_: Any, **__: Any) -> None:
        """Older files hand more arguments up, which nobody needs."""
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, *arguments: Any, **named: Any) -> Any:
        """``super().execute(prompt, label, sampling_params, ...)``: the user's ``AgentInstance`` in this process.

        Returns:
            The dict that such an ``execute`` returns.
        """
        if self.agent_instance_cls is None:
            raise AgentError(f"{type(self).__name__} gave no AgentInstance to super().__init__")
        given = dict(zip(("prompt", "label", "sampling_params"), arguments, strict=False)) | named
        agent, playing = self.agent_instance_cls, self.playing
        environments = InProcess(lambda seed: Instance(agent, playing.args))
        [row] = await MultiTurnAgentExecutor(environments).execute(_episode(given, playing))
        return as_result(row)


def make_executor(executor: type[AgentExecutorBase], offered: Mapping[str, Any]) -> OpenRlhfLoop:
    """An executor of a user's class, with our loop behind its ``super()``; ``__init__`` gets what it names of ``offered``."""
    working: Any = type(executor.__name__, (executor, OpenRlhfLoop), {"__module__": executor.__module__})
    made: OpenRlhfLoop = working(**called_with(working, {"result_queue": None, **offered}))
    return made


def _episode(given: Mapping[str, Any], playing: Playing) -> Episode:
    """The episode as this process knows it. ``given``: what the executor hands on, possibly altered."""
    payload = playing.engine.payload
    prompt, ids, messages = payload["prompt"], list(payload["prompt_token_ids"]), payload["messages"]
    if given.get("prompt", prompt) != prompt:
        prompt, messages = given["prompt"], None
        ids = list(playing.tokenizer.encode(prompt, add_special_tokens=False))
    sampling = payload["sampling"]
    trainers = {name: sampling[name] for name in TRAINERS} | {"stop": tuple(sampling["stop"])}
    label = given.get("label", payload["label"])
    return Episode(
        run_id="",
        iteration=0,
        prompt=Prompt(payload["row_id"], payload["datasource"], prompt, ids, label, messages),
        group_id=payload["group_id"],
        sample_index=payload["sample"],
        sampling=SamplingParams(max_tokens=sampling["max_tokens"], **trainers),
        max_len=payload["max_len"],
        generate=_Generate(playing.engine),
        tokenizer=playing.tokenizer,
        environment_seed=payload["seed"],
        end_ids=frozenset(payload["end_ids"]),
        limits=TurnLimits(payload["max_turns"], payload["max_turn_tokens"]),
        chat_template=payload["chat_template"],
    )


def as_result(row: Trajectory) -> dict[str, Any]:
    """A row as OpenRLHF's executors return it."""
    return {
        "prompt": row.prompt,
        "label": row.label,
        "observation_tokens": row.token_ids.tolist(),
        "action_ranges": [tuple(pair) for pair in row.action_ranges],
        "rollout_log_probs": row.rollout_logprobs.tolist(),
        "reward": row.reward,
        "scores": row.score,
        "extra_logs": {name.removeprefix(METRIC): value for name, value in row.metrics.items()},
        "truncated": row.stop_reason.truncated,
    }


@dataclass(frozen=True)
class _Generate:
    """``Generate`` over the parent's engine."""

    engine: ParentEngine

    async def generate(self, request: GenerateRequest) -> Generation:
        output = await self.engine.generate(
            request.prompt_token_ids, SimpleNamespace(max_tokens=request.sampling.max_tokens)
        )
        [said] = output.outputs
        logprobs = [entry[token].logprob for token, entry in zip(said.token_ids, said.logprobs, strict=True)]
        version = await self.engine.get_weight_version()
        stop = StopReason.LENGTH if said.finish_reason == "length" else StopReason.STOP
        if said.token_ids[-1] in self.engine.payload["end_ids"]:
            stop = StopReason.EOS
        spans = [VersionSpan(0, len(said.token_ids), version)]  # of no row: the parent has the engine's own
        return Generation(request.request_id, said.token_ids, logprobs, spans, stop)


def plain_result(result: Any) -> dict[str, Any]:
    """JSON of what ``execute`` returned."""
    if not isinstance(result, dict):
        raise AgentError(
            f"execute returned {shown(result)}: a dict is wanted, with observation_tokens, action_ranges, reward"
        )
    logs, dropped = plain_logs(result.get("extra_logs"))
    plain = {name: _plain(value) for name, value in result.items() if name in PLAIN}
    return {**plain, "logs": logs, "dropped_logs": dropped}


def _plain(value: Any) -> Any:
    """Lists and numbers out of arrays, tensors and tuples."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
