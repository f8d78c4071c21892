"""Policy updates with packed rows beside padded ones, on rows of log-normal lengths.

::

    padded    micro-batches of --micro-batch rows of similar lengths, each padded to its longest
    dynamic   padded, but filled up to the tokens of the largest of those (train.dynamic_batch_enable)
    packed    ds.packing_samples, filled up to as many tokens

Each side is a policy under DeepSpeed in this process: forward and backward pass, optimizer step. All train on the same rows in
the same optimizer steps, and the updates alternate. Before that the gradients of one step are compared. Speed is in tokens of
rows, padding not counted; the ratio is packed / padded, the median of the ratios of all rounds, and 1.5 is the number to hold.

How much padding there is depends on the rows of a rank and step (--rows): 16 are a batch of 128 samples on 8 ranks. The more
rows, the more alike are those of a micro-batch, and the smaller is the gain.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.report import finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import Experience
    from rlhf_core.training.policy import PolicyTrainer

SMOLLM2 = "smollm2-135m"  # random weights in the sizes of SmolLM2-135M
LARGEST_DIFFERENCE = 1e-4  # of gradients in fp32: of the largest entry, relative to the largest gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--model", default="builtin:tiny", help=f"a folder, builtin:tiny or {SMOLLM2}")
    parser.add_argument("--rows", type=int, default=16, help="of an optimizer step")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of an update")
    parser.add_argument("--median", type=int, default=128, help="tokens of a row")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of the lengths")
    parser.add_argument("--longest", type=int, default=1024, help="longer rows are cut")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--attention", default="sdpa", help="ds.attn_implementation")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, model_folder(arguments.model, folder))


def measure(arguments: argparse.Namespace, model: str) -> None:
    rows = make_rows(arguments)
    lengths = [len(row.token_ids) for row in rows]
    trainers = make_trainers(arguments, model, max(lengths))
    difference = compare_gradients(trainers, rows)
    speeds: dict[str, list[float]] = {side: [] for side in trainers}
    for repeat in range(arguments.repeats + 1):
        for side, trainer in trainers.items():
            seconds = trainer.update(rows, iteration=repeat).seconds
            if repeat > 0:  # the first round warms up
                speeds[side].append(sum(lengths) / seconds)
    ratios = [packed / padded for packed, padded in zip(speeds["packed"], speeds["padded"], strict=True)]
    finish(
        "update",
        speeds,
        statistics.median(ratios),
        "tokens/s",
        {
            "model": arguments.model,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "rows_per_step": arguments.rows,
            "steps": arguments.steps,
            "micro_batch": arguments.micro_batch,
            "tokens": sum(lengths),
            "longest": max(lengths),
            "median": int(statistics.median(lengths)),
            "padded_tokens": padded_tokens(trainers["padded"], rows),
            "gradient_difference": float(f"{difference:.1e}"),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "dynamic_ratio": round(
                statistics.median(d / p for d, p in zip(speeds["dynamic"], speeds["padded"], strict=True)), 3
            ),
        },
        arguments.json,
    )


def make_rows(arguments: argparse.Namespace) -> list[Experience]:
    """Rows whose first quarter is the prompt."""
    from rlhf_core.records import ActionRange, Experience

    rng = np.random.default_rng(0)
    drawn = np.exp(np.log(arguments.median) + arguments.sigma * rng.standard_normal(arguments.rows * arguments.steps))
    rows = []
    for index, length in enumerate(np.clip(drawn, 8, arguments.longest).astype(int).tolist()):
        actions = np.zeros(length, np.float32)
        actions[length // 4 :] = 1
        logprobs = (-5.8 + 0.1 * rng.standard_normal(length)).astype(np.float32) * actions
        rows.append(
            Experience(
                group_id=str(index),
                sample_index=0,
                segment_index=0,
                token_ids=rng.integers(0, 256, length).astype(np.int32),
                action_ranges=(ActionRange(length // 4, length),),
                rollout_logprobs=logprobs,
                old_logprobs=logprobs,
                ref_logprobs=None,
                values=None,
                advantages=np.float32(rng.standard_normal()) * actions,
                returns=np.zeros(length, np.float32),
                reward=0.0,
                shaped_reward=0.0,
                temperature=1.0,
                constrained=False,
            )
        )
    return rows


def make_trainers(arguments: argparse.Namespace, model: str, longest: int) -> dict[str, PolicyTrainer]:
    from rlhf_core.config import parse_config
    from rlhf_core.training.policy import PolicyTrainer
    from rlhf_core.training.ranks import RankInfo, init_distributed

    rank = RankInfo(0, 1, 0, "127.0.0.1", free_port(), arguments.device, num_threads=1)
    init_distributed(rank, timeout=60)
    budget = arguments.micro_batch * longest
    dynamic = ["train.dynamic_batch_enable=true", f"train.max_tokens_per_gpu={budget}"]
    sides = {"padded": [], "dynamic": dynamic, "packed": [*dynamic, "ds.packing_samples=true"]}
    base = {
        "actor": {"model_name_or_path": model, "adam": {"lr": 1e-6}},
        "data": {"prompt_dataset": "none.jsonl", "max_len": max(longest, 2)},
        "reward": {"functions": [{"use": "digits"}]},
        "rollout": {"batch_size": arguments.rows * arguments.steps, "n_samples_per_prompt": 1, "max_new_tokens": 1},
        "train": {"batch_size": arguments.rows, "micro_batch_size": arguments.micro_batch},
        "algo": {"advantage": {"estimator": "reinforce"}},
        "ds": {"param_dtype": arguments.dtype, "attn_implementation": arguments.attention},
    }
    return {
        side: PolicyTrainer(parse_config(base, overrides), model, rank, total_steps=1000)
        for side, overrides in sides.items()
    }


def compare_gradients(trainers: dict[str, PolicyTrainer], rows: Sequence[Experience]) -> float:
    """The largest difference to the padded gradient of the first step, as a share of that gradient's largest entry."""
    from deepspeed.utils import safe_get_full_grad

    gradients: dict[str, list[Any]] = {}
    for side, trainer in trainers.items():
        step, *_ = trainer.plan(rows, iteration=0)
        trainer.engine.train()
        trainer.accumulate(step, rows, kl_coef=0.0)
        gradients[side] = [safe_get_full_grad(parameter).clone() for parameter in trainer.hf_model.parameters()]
        trainer.apply()
    largest = max(float(gradient.abs().max()) for gradient in gradients["padded"])
    differences = {
        side: max(float((g - p).abs().max()) for g, p in zip(found, gradients["padded"], strict=True)) / largest
        for side, found in gradients.items()
    }
    if trainers["padded"].config.ds.param_dtype == "fp32" and differences["packed"] > LARGEST_DIFFERENCE:
        raise SystemExit(f"packed rows give another gradient: it differs by {differences['packed']:.1e}")
    return differences["packed"]


def padded_tokens(trainer: PolicyTrainer, rows: Sequence[Experience]) -> int:
    """Tokens of an update, padding counted."""
    return sum(
        len(micro_batch.rows) * max(len(rows[i].token_ids) for i in micro_batch.rows)
        for step in trainer.plan(rows, iteration=1)
        for micro_batch in step.micro_batches[0]
    )


def model_folder(name: str, folder: str) -> str:
    from benchmarks.random_model import save_smollm2
    from rlhf_core.data.tiny_model import resolve_model

    if name != SMOLLM2:
        return resolve_model(name, Path(folder))
    save_smollm2(Path(folder))
    return folder


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
