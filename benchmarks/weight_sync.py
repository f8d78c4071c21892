"""One weight sync, step by step, beside a memcpy of the same bytes; and what it costs the requests it meets in flight.

::

    trainer   pack: every tensor ─▶ a file in shared memory                        engines go on
    engine    prepare: map, prove the checksum                                     engines go on
              pause ─▶ start ─▶ load ─▶ finish ─▶ stamp ─▶ resume                    held
    memcpy    the bytes of the model, from one buffer into another

The transfer is measured on idle engines: of the tiny model, where it shows what a sync costs in any case, and of one of
SmolLM2's size. Then, on the tiny model, requests are sampled until each has so many tokens, the weights change, and they go on
to the end: with ``train.partial_rollout_kv=recompute``, with ``keep``, and without an update, by turns. Stalled is the time
from the pause to the moment at which every request has one token more. The ratio is bytes per second, sync / memcpy, of the
larger model.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.random_model import save_smollm2
from benchmarks.report import finish
from rlhf_core.data.tiny_model import make_tiny_model
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.senders import ShmSender
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.generation.sync import round_steps
from rlhf_core.records import GenerateRequest, Generation, SamplingParams
from rlhf_core.weights import TensorMeta, total_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rlhf_core.weights import WeightUpdate

TINY, SMOLLM2 = "tiny", "135M"
NEVER_SAID = ("\N{SNOWMAN}" * 3,)  # where a stop string is looked for, each token is sent as soon as it is sampled
HELD = ("pause", "start", "load", "finish", "stamp", "resume")  # steps during which nothing is generated


class Trainer:
    """The parameters of a model, and the sender of a training rank."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.sender = ShmSender(self, "benchmark", rank=0)
        self.nbytes = total_bytes(self)

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, p.dtype, tuple(p.shape)) for name, p in self.model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p.detach()) for name, p in self.model.named_parameters())


class Bench:
    """A running engine, its trainer, and the seconds that each step took."""

    def __init__(self, engine: VllmEngine, trainer: Trainer, arguments: argparse.Namespace) -> None:
        self._engine, self._trainer, self._arguments = engine, trainer, arguments
        self._version = 0

    async def sync(self) -> dict[str, float]:
        """Seconds of each step."""
        self._version += 1
        start = time.perf_counter()
        update = self._trainer.sender.send(self._version)
        assert update is not None, "rank 0 sends"
        return {"pack": time.perf_counter() - start} | await self._apply(update)

    async def in_flight(self, repeat: int, update: bool) -> dict[str, float]:
        """Seconds of a batch that new weights meet half-way, if ``update``."""
        start = time.perf_counter()
        batch = asyncio.create_task(self._generate(repeat))
        before = self._arguments.before
        await self._all_have(before)
        found = {"tokens": float(self._tokens_in_flight())}
        if update:
            seconds = await self.sync()
            begun = time.perf_counter()
            await self._all_have(before, more=True)
            found["held"] = sum(seconds[step] for step in HELD)
            found["stalled"] = found["held"] + time.perf_counter() - begun
        generations = await batch
        found["batch"] = time.perf_counter() - start
        for generation in generations:
            assert len(generation.version_spans) == 1 + update, generation.version_spans
        return found

    async def _apply(self, update: WeightUpdate) -> dict[str, float]:
        seconds = {}
        for name, step in round_steps(self._engine.client, update):
            start = time.perf_counter()
            await step()
            seconds[name] = time.perf_counter() - start
        return seconds

    async def _generate(self, repeat: int) -> list[Generation]:
        arguments = self._arguments
        generator = np.random.default_rng(repeat)
        requests = []
        for index in range(arguments.requests):
            prompt = generator.integers(32, 127, arguments.prompt).tolist()
            length = arguments.before + arguments.after
            sampling = SamplingParams(max_tokens=length, ignore_eos=True, seed=index, stop=NEVER_SAID)
            requests.append(GenerateRequest(str(index), prompt, sampling, affinity=""))
        found: list[Generation] = []
        async for chunk in self._engine.generate_many(requests):
            for _, outcome in chunk:
                assert isinstance(outcome, Generation), outcome
                found.append(outcome)
        return found

    async def _all_have(self, tokens: int, more: bool = False) -> None:
        """Return when every request in flight has so many tokens, or ``more`` than it has now."""
        goals = {name: (count + 1 if more else tokens) for name, count in self._spoken().items()}
        while not goals or any(self._spoken().get(name, goal) < goal for name, goal in goals.items()):
            await asyncio.sleep(0.001)
            goals = goals or dict.fromkeys(self._spoken(), tokens)

    def _spoken(self) -> dict[str, int]:
        states = self._engine.client.output_processor.request_states
        return {name: state.detokenizer.num_output_tokens() for name, state in states.items()}

    def _tokens_in_flight(self) -> int:
        return sum(self._arguments.prompt + count for count in self._spoken().values())


@asynccontextmanager
async def running(folder: Path, kv: Any, arguments: argparse.Namespace) -> AsyncIterator[Bench]:
    """One engine that answers the question of the KV cache in one way."""
    settings = EngineSettings(
        str(folder),
        "float32",  # as the trainer's, so that a memcpy of the same bytes is all that a sync could be
        max_model_len=arguments.prompt + arguments.before + arguments.after,
        max_num_seqs=arguments.requests,
        device="cpu",
        sync_backend="shm",
        cpu_kv_cache_gib=arguments.kv_gib,
        partial_rollout_kv=kv,
    )
    engine, trainer = VllmEngine(settings), Trainer(folder)
    await engine.start(version=0)
    try:
        yield Bench(engine, trainer, arguments)
    finally:
        trainer.sender.close()
        await engine.shutdown()


def memcpy_seconds(nbytes: int, repeats: int) -> list[float]:
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - start)
    return found


def make_model(name: str, folder: Path) -> Path:
    """Weights are random: only their size matters. The tokenizer is the tiny model's."""
    made = make_tiny_model(folder / name)
    if name == SMOLLM2:
        save_smollm2(made)
    return made


async def transfers(folder: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each step of each repeat."""
    async with running(folder, "recompute", arguments) as bench:
        await bench.sync()  # warms up
        return [await bench.sync() for _ in range(arguments.repeats)]


async def in_flight(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What each repeat found, for each answer to what becomes of the KV cache, and without an update."""
    found: dict[str, list[dict[str, float]]] = {"recompute": [], "keep": [], "no update": []}
    async with running(folder, "recompute", arguments) as recompute, running(folder, "keep", arguments) as keep:
        engines = {"recompute": recompute, "keep": keep, "no update": recompute}
        for repeat in range(arguments.repeats + 1):
            for name, bench in engines.items():
                found[name].append(await bench.in_flight(repeat, update=name != "no update"))
    return {name: repeats[1:] for name, repeats in found.items()}  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="in flight when the weights change")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--before", type=int, default=128, help="tokens of each answer before the update")
    parser.add_argument("--after", type=int, default=128, help="tokens of each answer after it")
    parser.add_argument("--kv-gib", type=float, default=0.5, help="of each engine's KV cache")
    arguments = parser.parse_args()
    sides: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for name in (TINY, SMOLLM2):
            folder = make_model(name, Path(root))
            nbytes = Trainer(folder).nbytes
            copies = memcpy_seconds(nbytes, 3 * arguments.repeats)
            rounds = asyncio.run(transfers(folder, arguments))
            sides[f"{name} memcpy"] = copies
            sides |= {f"{name} {step}": [seconds[step] for seconds in rounds] for step in rounds[0]}
            sides[f"{name} all"] = [sum(seconds.values()) for seconds in rounds]
            sides[f"{name} held"] = [sum(seconds[step] for step in HELD) for seconds in rounds]
            facts[f"{name}_mb"] = round(nbytes / 1e6, 1)
            facts[f"{name}_sync_mb_s"] = round(nbytes / 1e6 / statistics.median(sides[f"{name} all"]), 1)
            facts[f"{name}_memcpy_mb_s"] = round(nbytes / 1e6 / statistics.median(copies), 1)
        met = asyncio.run(in_flight(Path(root) / TINY, arguments))
    sides |= {f"{name}: batch": [repeat["batch"] for repeat in repeats] for name, repeats in met.items()}
    for name in ("recompute", "keep"):
        sides |= {f"{name}: {what}": [repeat[what] for repeat in met[name]] for what in ("held", "stalled")}
    facts |= {"requests": arguments.requests, "tokens_in_flight": int(met["recompute"][-1]["tokens"])}
    ratio = statistics.median(sides[f"{SMOLLM2} memcpy"]) / statistics.median(sides[f"{SMOLLM2} all"])
    milliseconds = {side: [1000 * seconds for seconds in repeats] for side, repeats in sides.items()}
    finish("weight_sync", milliseconds, ratio, "ms", facts, arguments.json)


if __name__ == "__main__":
    main()
