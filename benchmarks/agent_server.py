"""The OpenAI-compatible server under load, beside vLLM's own ``generate`` on the same prompts.

::

    served   sessions × (openai client ─▶ HTTP ─▶ chat template, tools, record ─▶ vLLM)     one process of clients
    raw      sessions × (AsyncLLM.generate on the token ids of those very calls)            in the engine's process

All sessions run at once; each makes its calls one after the other, and each call goes on from the one before. The two sides
take turns, each with an empty prefix cache. A call is lost if its client got no answer, or its tokens are not in the session's
record. The figure is calls per second, served / raw; the latencies are what a client waits for one call.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from benchmarks.report import finish
from rlhf_core.agents.openai.function import make_async_client
from rlhf_core.cluster.connect import connect, disconnect
from rlhf_core.cluster.context import WorkerContext
from rlhf_core.cluster.engine_worker import EngineWorker
from rlhf_core.cluster.groups import WORKER_ENVIRONMENT, run_members
from rlhf_core.cluster.placement import place
from rlhf_core.cluster.session_router import SessionRouter
from rlhf_core.config import load_config
from rlhf_core.data import models_of, pin_models
from rlhf_core.records import SamplingParams, SessionRecord, SessionRequest
from tasks.opening import model_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTIONS = ("Name a number.", "And another one?", "One more, please.", "Which was the largest?")
CALL_SECONDS = 600.0


@dataclass
class Side:
    """What one side of a repeat took."""

    seconds: float  # of all calls
    latencies: list[tuple[int, float]]  # (which of its session's calls, seconds)
    lost: int = 0
    client_cpu: float = 0.0  # seconds of the process of clients, a call
    records: list[SessionRecord] = field(default_factory=list)

    @property
    def calls_per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile(self, share: float, first: bool) -> float:
        """Milliseconds; of the first calls of all sessions, which start together, or of the later ones."""
        chosen = [seconds for call, seconds in self.latencies if (call == 0) is first]
        return float(np.percentile(chosen, share)) * 1000 if chosen else 0.0


class MeasuredEngine(EngineWorker):
    """The run's own engine worker, and vLLM without anything in front of it."""

    async def forget(self) -> None:
        """Empty the prefix cache."""
        await self._running.reset_prefix_cache()

    async def raw(self, sessions: Sequence[Sequence[tuple[int, ...]]], tokens: int) -> Side:
        """All sessions at once; the prompts of each one after the other."""
        from vllm import SamplingParams as VllmSampling
        from vllm.sampling_params import RequestOutputKind

        llm = self._running._llm
        latencies: list[tuple[int, float]] = []

        async def play(index: int, prompts: Sequence[tuple[int, ...]]) -> None:
            for call, prompt in enumerate(prompts):
                params = VllmSampling(
                    max_tokens=tokens, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
                )
                begun = time.perf_counter()
                async for output in llm.generate({"prompt_token_ids": list(prompt)}, params, f"raw-{index}-{call}"):
                    assert len(output.outputs[0].token_ids) == tokens
                latencies.append((call, time.perf_counter() - begun))

        start = time.perf_counter()
        await asyncio.gather(*(play(index, prompts) for index, prompts in enumerate(sessions)))
        return Side(time.perf_counter() - start, latencies)


async def served(engine: Any, repeat: int, arguments: argparse.Namespace) -> Side:
    """All sessions at once, each with a client of its own."""
    router = SessionRouter([engine])
    latencies: list[tuple[int, float]] = []
    requests = [
        SessionRequest(
            session_id=f"{repeat}-{index}",
            sampling=SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, seed=None),
            max_tokens=arguments.tokens * arguments.calls,
            max_len=arguments.context,
            max_calls=arguments.calls,
        )
        for index in range(arguments.sessions)
    ]
    sessions = await asyncio.gather(*(router.open_session(request) for request in requests))

    async def play(index: int) -> None:
        async with make_async_client(sessions[index], CALL_SECONDS) as client:
            messages: list[Any] = []
            for call in range(arguments.calls):
                asked = f"{QUESTIONS[call % len(QUESTIONS)]} ({index})"
                messages.append({"role": "user", "content": asked})
                begun = time.perf_counter()
                reply = await client.chat.completions.create(model="policy", messages=messages)
                latencies.append((call, time.perf_counter() - begun))
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})

    start, cpu = time.perf_counter(), time.process_time()
    ends = await asyncio.gather(*(play(index) for index in range(arguments.sessions)), return_exceptions=True)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    for error in {f"{type(end).__name__}: {end}" for end in ends if end is not None}:
        print(f"  lost: {error[:300]}")
    records = await asyncio.gather(*(router.close_session(request.session_id) for request in requests))
    recorded = sum(len(call.token_ids) == arguments.tokens for record in records for call in record.calls)
    lost = arguments.sessions * arguments.calls - min(recorded, len(latencies))
    return Side(seconds, latencies, lost, cpu / max(1, len(latencies)), list(records))


async def measure(engine: Any, arguments: argparse.Namespace) -> list[tuple[Side, Side]]:
    """Pairs of (served, raw), after one that warms up."""
    pairs = []
    for repeat in range(arguments.repeats + 1):
        await engine.forget.remote()
        over_http = await served(engine, repeat, arguments)
        prompts = [[call.prompt_token_ids for call in record.calls] for record in over_http.records]
        await engine.forget.remote()
        pairs.append((over_http, await engine.raw.remote(prompts, arguments.tokens)))
    return pairs[1:]


def report(pairs: Sequence[tuple[Side, Side]], arguments: argparse.Namespace) -> None:
    """Table and JSON."""

    latency: dict[str, dict[str, float]] = {}
    for when, first in (("first_call", True), ("later_calls", False)):
        for share in (50, 99):
            over_http, raw = (
                statistics.median(pair[side].percentile(share, first) for pair in pairs) for side in (0, 1)
            )
            name = f"{when}_p{share}_ms"
            latency[name] = {"served": round(over_http, 1), "raw": round(raw, 1), "overhead": round(over_http - raw, 1)}
            print(f"  {name:<20} served {over_http:>9.1f} raw {raw:>9.1f} overhead {over_http - raw:>9.1f}")
    calls = [call for pair in pairs for record in pair[0].records for call in record.calls]
    sides = {
        "served": [pair[0].calls_per_second for pair in pairs],
        "raw": [pair[1].calls_per_second for pair in pairs],
    }
    facts = {
        "model": arguments.model,
        "sessions": arguments.sessions,
        "calls_each": arguments.calls,
        "tokens_each": arguments.tokens,
        "calls": len(calls),
        "lost_calls": sum(pair[0].lost for pair in pairs),
        "continued_calls": sum(call.continued for call in calls),
        "clients_cpu_ms_a_call": round(statistics.median(pair[0].client_cpu for pair in pairs) * 1000, 2),
        **latency,
    }
    ratio = statistics.median(sides["served"]) / statistics.median(sides["raw"])
    finish("agent_server", sides, ratio, "calls/s", facts, arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--calls", type=int, default=3, help="of each session, one after the other")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--context", type=int, default=512, help="tokens of prompt and answer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        config = load_config(
            "configs/grpo_tiny_cpu.yaml",
            [
                f"actor.model_name_or_path={arguments.model}",
                f"rollout.max_new_tokens={arguments.tokens}",
                f"data.max_len={arguments.context}",
                f"storage.root={root}",
                "data.apply_chat_template=true",
            ],
        )
        nodes = connect(None)
        models = pin_models(models_of(config), config.storage)
        context = WorkerContext("benchmark", config, "cpu", ".", model_cache(), models)
        environment = run_members(config, place(config, nodes), threads=1)["engine"].environment
        worker: Any = ray.remote(MeasuredEngine).options(
            num_cpus=0, runtime_env={"env_vars": {**WORKER_ENVIRONMENT, **environment}}
        )
        engine = worker.remote(context, 0)
        ray.get(engine.start.remote())
        report(asyncio.run(measure(engine, arguments)), arguments)
        ray.get(engine.shutdown.remote())
        disconnect()


if __name__ == "__main__":
    main()
