"""GAE and returns beside a plain loop over T on a time-major copy, and the whole way from rewards to advantages.

::

    loop   one step of Python per token on [T, B] copies, float32: what a direct transcription of the formulas does
    ours   rlhf_core.algorithms.returns: one fused multiply-add per token, float64

Both step over tokens that are not the policy's. They alternate in one run, and ours is compared with the loop in float64. The
ratio is ours / loop, the worse one of GAE and returns; 1.0 is the number to hold. The lines with an estimator's name are
compute_advantages: groups of 8, a KL penalty, whitening where the estimator asks for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.report import finish
from rlhf_core.algorithms.advantages import AdvantageInput, compute_advantages
from rlhf_core.algorithms.estimators import ESTIMATORS
from rlhf_core.algorithms.returns import discounted_returns, generalised_advantages

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

GAMMA, LAMBD = 0.99, 0.95
SPOKEN = 0.8  # share of tokens that are the policy's
GROUP = 8


def loop_gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    rewards_TB, values_TB, mask_TB = (x.T.contiguous() for x in (rewards_BT, values_BT, mask_BT))
    advantages_TB = torch.zeros_like(rewards_TB)
    advantage_B = next_value_B = torch.zeros_like(rewards_TB[0])
    for t in reversed(range(len(rewards_TB))):
        delta_B = rewards_TB[t] + GAMMA * next_value_B - values_TB[t]
        advantage_B = torch.where(mask_TB[t], delta_B + GAMMA * LAMBD * advantage_B, advantage_B)
        next_value_B = torch.where(mask_TB[t], values_TB[t], next_value_B)
        advantages_TB[t] = advantage_B
    return torch.where(mask_BT, advantages_TB.T, 0.0)


def loop_returns(rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    rewards_TB, mask_TB = (x.T.contiguous() for x in (rewards_BT, mask_BT))
    returns_TB = torch.zeros_like(rewards_TB)
    return_B = torch.zeros_like(rewards_TB[0])
    for t in reversed(range(len(rewards_TB))):
        return_B = torch.where(mask_TB[t], rewards_TB[t] + GAMMA * return_B, return_B)
        returns_TB[t] = return_B
    return torch.where(mask_BT, returns_TB.T, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    shape = (arguments.rows, arguments.tokens)
    rewards_BT, values_BT, kl_BT = (torch.randn(shape) for _ in range(3))
    mask_BT = torch.rand(shape) < SPOKEN
    worst = max(
        largest_difference(
            generalised_advantages(rewards_BT, values_BT, mask_BT, GAMMA, LAMBD),
            loop_gae(rewards_BT.double(), values_BT.double(), mask_BT),
        ),
        largest_difference(
            discounted_returns(rewards_BT, mask_BT, GAMMA),
            loop_returns(rewards_BT.double(), mask_BT),
        ),
    )
    if worst > 1e-9:
        raise SystemExit(f"the values differ by {worst:.3g}")

    batch = AdvantageInput(
        rewards_B=torch.randn(arguments.rows, dtype=torch.float64),
        group_keys=[row // GROUP for row in range(arguments.rows)],
        sample_keys=[row % GROUP for row in range(arguments.rows)],
        mask_BT=mask_BT,
        kl_BT=kl_BT,
        values_BT=values_BT,
    )
    calls: dict[str, Callable[[], object]] = {
        "GAE, ours": lambda: generalised_advantages(rewards_BT, values_BT, mask_BT, GAMMA, LAMBD),
        "GAE, loop": lambda: loop_gae(rewards_BT, values_BT, mask_BT),
        "returns, ours": lambda: discounted_returns(rewards_BT, mask_BT, GAMMA),
        "returns, loop": lambda: loop_returns(rewards_BT, mask_BT),
    }
    for name, estimator in ESTIMATORS.items():
        calls[name] = lambda estimator=estimator: compute_advantages(batch, estimator, kl_coef=0.1)
    sides = alternate(calls, arguments.repeats)
    median = {name: statistics.median(repeats) for name, repeats in sides.items()}
    gae, returns = (median[f"{name}, ours"] / median[f"{name}, loop"] for name in ("GAE", "returns"))
    facts = {
        "rows": arguments.rows,
        "tokens": arguments.tokens,
        "threads": torch.get_num_threads(),
        "largest_difference": worst,
        "ratio_gae": round(gae, 3),
        "ratio_returns": round(returns, 3),
    }
    finish("advantages", sides, max(gae, returns), "ms", facts, arguments.json)


def alternate(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call; the first round warms up."""
    sides: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            sides[name].append(1000 * (time.perf_counter() - start))
    return {name: timed[1:] for name, timed in sides.items()}


def largest_difference(one_BT: Tensor, other_BT: Tensor) -> float:
    return float((one_BT - other_BT).abs().max())


if __name__ == "__main__":
    main()
