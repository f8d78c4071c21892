"""Rollout through the executors beside vLLM's own ``LLM.generate`` on the same prompts.

::

    ours   rollout worker ─▶ executor ─▶ router ─▶ Ray ─▶ engine ─▶ trajectories ─▶ published shards
    raw    LLM.generate(all prompts), in a process of its own with the same engine settings

The ratio is ours / raw in tokens per second; 0.95 is the number to hold.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import ray

from benchmarks.report import finish
from rlhf_core.cluster.connect import connect, disconnect
from rlhf_core.cluster.context import WorkerContext
from rlhf_core.cluster.groups import ActorGroups, run_members
from rlhf_core.cluster.placement import place
from rlhf_core.config import Config, load_config
from rlhf_core.data import load_tokenizer, models_of, pin_models, sample_seed, training_prompts
from rlhf_core.records import Draw, PromptCursor
from tasks.opening import model_cache


class RawEngine:
    """vLLM's offline engine in a Ray actor."""

    def __init__(self, context: WorkerContext) -> None:
        context.enter("raw")
        self._config = context.config
        self._model = context.model("policy")

    def start(self) -> None:
        from vllm import LLM

        from rlhf_core.generation.settings import EngineSettings

        settings = EngineSettings.from_config(self._config, self._model, "cpu")
        self._llm = LLM(**settings.engine_arguments())
        prompts = training_prompts(self._config, load_tokenizer(self._model))
        order = prompts.order(self._config.train.seed)
        drawn, _ = order.draw(PromptCursor(), self._config.rollout.batch_size)
        self._prompts = [prompts[i] for i in drawn]
        self.generate(-1)

    def generate(self, iteration: int) -> float:
        """Seconds for all samples of all prompts."""
        from vllm import SamplingParams

        rollout = self._config.rollout
        self._llm.reset_prefix_cache()
        inputs, params = [], []
        for prompt in self._prompts:
            for sample in range(rollout.n_samples_per_prompt):
                inputs.append({"prompt_token_ids": prompt.token_ids})
                seed = sample_seed(self._config.train.seed, iteration, prompt.row_id, sample)
                params.append(
                    SamplingParams(
                        max_tokens=rollout.max_new_tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=seed
                    )
                )
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == tokens(self._config)
        return seconds


def tokens(config: Config) -> int:
    """Sampled tokens of one rollout."""
    return config.samples_per_iteration * config.rollout.max_new_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        config = load_config(
            "configs/grpo_tiny_cpu.yaml",
            [
                f"actor.model_name_or_path={arguments.model}",
                f"rollout.batch_size={arguments.prompts}",
                f"rollout.n_samples_per_prompt={arguments.samples}",
                f"rollout.max_new_tokens={arguments.tokens}",
                f"data.max_len={arguments.tokens + 96}",
                f"storage.root={root}",
            ],
        )
        measure(config, arguments)


def measure(config: Config, arguments: argparse.Namespace) -> None:
    nodes = connect(None)
    models = pin_models(models_of(config), config.storage)
    context = WorkerContext("benchmark", config, "cpu", ".", model_cache(), models)
    placement = place(config, nodes)
    members = run_members(config, placement, threads=1)
    groups = ActorGroups(context, members, placement)
    groups.reserve(config.run.start_timeout)
    engine, worker = groups.actor("engine"), groups.actor("rollout")
    environment = {"env_vars": dict(members["engine"].environment)}
    raw: Any = ray.remote(RawEngine).options(num_cpus=0, runtime_env=environment).remote(context)
    ray.get([engine.start.remote(), worker.start.remote(), raw.start.remote()])
    ours_s, raw_s = [], []
    # Warm-up, as raw.start does.
    ray.get(worker.rollout.remote(Draw(0, 0, PromptCursor(), arguments.prompts), [engine]))
    for repeat in range(1, arguments.repeats + 1):
        start = time.perf_counter()
        ray.get(worker.rollout.remote(Draw(repeat, 0, PromptCursor(), arguments.prompts), [engine]))
        ours_s.append(time.perf_counter() - start)
        raw_s.append(ray.get(raw.generate.remote(repeat)))
    count = tokens(config)
    sides = {"ours": [count / s for s in ours_s], "raw": [count / s for s in raw_s]}
    ratio = statistics.median(sides["ours"]) / statistics.median(sides["raw"])
    facts = {
        "model": arguments.model,
        "samples": config.samples_per_iteration,
        "tokens_each": config.rollout.max_new_tokens,
    }
    finish("rollout", sides, ratio, "tokens/s", facts, arguments.json)
    groups.discard()
    disconnect()


if __name__ == "__main__":
    main()
