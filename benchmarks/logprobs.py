"""What it costs never to hold the full logits: ``chunked_logprobs`` beside log_softmax over all of them.

::

    naive   logits = hidden @ weight.T ─▶ log_softmax ─▶ chosen log-probs, entropies ─▶ backward
    ours    chunked_logprobs at the default ds.logprob_chunk ─▶ backward

Both get the same fp32 inputs on CPU and give the gradients of hidden states and weight. The temperature is 1, and the naive
side does not even divide by it.

Time: both sides alternate in one process. The ratio is ours / naive in CPU seconds of all threads (the machine may be
shared), medians of the repeats; 1.3 is the number to hold. Wall seconds are given too.

Memory: each side in a fresh process. The highest resident set of the process (``VmHWM``), less what is resident once
the inputs exist and the kernels have run on a few rows, less the two gradients, which both sides must make. 150 MB is the
number to hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAIVE_COPIES = {False: 3, True: 5}  # of the logits that the naive side holds at its worst, without and with entropies
WARM_TOKENS = 8


@dataclass(frozen=True)
class Sizes:
    tokens: int
    vocabulary: int
    hidden: int
    threads: int
    want_entropy: bool

    @property
    def logits_bytes(self) -> int:
        return 4 * self.tokens * self.vocabulary

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.hidden * (self.tokens + self.vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print(f"logprobs: tokens={arguments.tokens}, vocabulary={arguments.vocab}, hidden={arguments.hidden}")
    parts = {}
    for label, want_entropy in (("log-probs", False), ("log-probs and entropies", True)):
        sizes = Sizes(arguments.tokens, arguments.vocab, arguments.hidden, arguments.threads, want_entropy)
        parts[label] = measure(sizes, arguments.repeats)
        print_part(label, parts[label])
    if arguments.json is not None:
        body = {"name": "logprobs", "ratio": max(part["ratio"] for part in parts.values()), **vars(arguments)}
        Path(arguments.json).write_text(json.dumps({**body, "parts": parts}, indent=1))


def measure(sizes: Sizes, repeats: int) -> dict[str, Any]:
    check_memory(sizes)
    memory = {side: in_fresh_process(extra_memory, sizes, side) for side in SIDES}
    times, differences = in_fresh_process(alternate, sizes, repeats)
    cpu = {side: statistics.median(cpu_s for cpu_s, _ in times[side]) for side in SIDES}
    wall = {side: statistics.median(wall_s for _, wall_s in times[side]) for side in SIDES}
    return {
        "ratio": cpu["ours"] / cpu["naive"],
        "wall_ratio": wall["ours"] / wall["naive"],
        "cpu_s": {side: [cpu_s for cpu_s, _ in times[side]] for side in SIDES},
        "wall_s": {side: [wall_s for _, wall_s in times[side]] for side in SIDES},
        "extra_bytes": memory,
        "differences": differences,
        "sizes": asdict(sizes),
    }


def print_part(label: str, part: dict[str, Any]) -> None:
    print(f"  {label}")
    for side in SIDES:
        shown = "  ".join(f"{value:.4g}" for value in part["cpu_s"][side])
        print(
            f"    {side:<6} median {statistics.median(part['cpu_s'][side]):.4g} CPU s   ({shown})   "
            f"wall {statistics.median(part['wall_s'][side]):.4g} s   extra memory {part['extra_bytes'][side] / 1e6:.0f} MB"
        )
    print(f"    ratio  {part['ratio']:.3f} CPU, {part['wall_ratio']:.3f} wall")
    print("    differences  " + ", ".join(f"{name} {value:.1e}" for name, value in part["differences"].items()))


def check_memory(sizes: Sizes) -> None:
    import psutil

    needed = NAIVE_COPIES[sizes.want_entropy] * sizes.logits_bytes + 2 * sizes.gradient_bytes
    free = psutil.virtual_memory().available
    if needed > free:
        raise SystemExit(
            f"the naive side needs about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free: lower --vocab"
        )


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(function, *args).result()


# --- what the processes run ----------------------------------------------------------------------------------------------


def extra_memory(sizes: Sizes, side: str) -> int:
    """Bytes, besides inputs and gradients."""
    inputs = make_inputs(sizes)
    before = resident_bytes("VmRSS")
    SIDES[side](*inputs, sizes.want_entropy)
    return resident_bytes("VmHWM") - before - sizes.gradient_bytes


def alternate(sizes: Sizes, repeats: int) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """CPU and wall seconds of each repeat, and the largest differences."""
    inputs = make_inputs(sizes)
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    differences: dict[str, float] = {}
    for _ in range(repeats):
        results = {}
        for side, score in SIDES.items():
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            results[side] = score(*inputs, sizes.want_entropy)
            times[side].append((time.process_time() - cpu_start, time.perf_counter() - wall_start))
        differences = compare(results["ours"], results["naive"])
    return times, differences


def make_inputs(sizes: Sizes) -> tuple[Tensor, ...]:
    """hidden [N, H], weight [V, H], targets [N], and two weights a token for the loss; kernels are warm afterwards."""
    import torch

    torch.set_num_threads(sizes.threads)
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(sizes.tokens, sizes.hidden, generator=generator)
    weight_VH = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator).mul_(2 * sizes.hidden**-0.5)
    targets_N = torch.randint(0, sizes.vocabulary, (sizes.tokens,), generator=generator)
    loss_weights = torch.randn(2, sizes.tokens, generator=generator)
    few = slice(WARM_TOKENS)
    for score in SIDES.values():
        score(hidden_NH[few], weight_VH[few], targets_N[few] % WARM_TOKENS, *loss_weights[:, few], True)
    return hidden_NH, weight_VH, targets_N, *loss_weights


def naive(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, scale_N: Tensor, entropy_scale_N: Tensor, entropy: bool
) -> dict[str, Tensor]:
    hidden_NH, weight_VH = hidden_NH.detach().requires_grad_(), weight_VH.detach().requires_grad_()
    logp_NV = (hidden_NH @ weight_VH.T).log_softmax(dim=1)
    logprobs_N = logp_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(dim=1) if entropy else None
    del logp_NV
    return differentiate(hidden_NH, weight_VH, logprobs_N, entropy_N, scale_N, entropy_scale_N)


def ours(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, scale_N: Tensor, entropy_scale_N: Tensor, entropy: bool
) -> dict[str, Tensor]:
    from rlhf_core.algorithms.logprobs import chunked_logprobs
    from rlhf_core.config.trained import DeepSpeedConfig

    hidden_NH, weight_VH = hidden_NH.detach().requires_grad_(), weight_VH.detach().requires_grad_()
    chunk = DeepSpeedConfig().logprob_chunk
    logprobs_N, entropy_N = chunked_logprobs(hidden_NH, weight_VH, None, targets_N, 1.0, chunk, entropy)
    return differentiate(hidden_NH, weight_VH, logprobs_N, entropy_N, scale_N, entropy_scale_N)


def differentiate(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    scale_N: Tensor,
    entropy_scale_N: Tensor,
) -> dict[str, Tensor]:
    loss = (logprobs_N * scale_N).sum()
    if entropy_N is not None:
        loss = loss + (entropy_N * entropy_scale_N).sum()
    loss.backward()
    results = {"logprobs": logprobs_N.detach(), "grad_hidden": hidden_NH.grad, "grad_weight": weight_VH.grad}
    if entropy_N is not None:
        results["entropy"] = entropy_N.detach()
    return results


SIDES = {"naive": naive, "ours": ours}


def compare(ours: dict[str, Tensor], naive: dict[str, Tensor]) -> dict[str, float]:
    """Values: the largest difference. Gradients: the largest difference over the largest gradient, and that of norms.

    Entropies differ by about 1e-5 because the naive sum over the vocabulary is off by that much, in fp32.
    """
    found = {}
    for name, expected in naive.items():
        difference = ours[name] - expected
        largest = difference.abs().max()
        if name.startswith("grad"):
            found[f"{name}, largest"] = float(largest / expected.abs().max())
            found[f"{name}, norm"] = float(difference.norm() / expected.norm())
        else:
            found[name] = float(largest)
    return found


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (at the highest) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
