"""What a run will do, by its configuration and its prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_core.cluster.rollout_worker import DataFacts
    from rlhf_core.config import Config


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the whole run will do; fixed when it first starts."""

    prompts: int
    dropped: int
    fingerprint: str
    iterations: int
    total_steps: int  # of the policy
    critic_steps: int = 0


def make_plan(config: Config, facts: DataFacts, replayed: slice = slice(None)) -> RunPlan:
    """Iterations and optimizer steps of the whole run.

    Batches do not cross epochs: the last one of each is short where the prompts do not divide. Samples that fail may
    make the run a few steps shorter than planned; filtering may end it many iterations earlier, never later.

    Args:
        config: the run's.
        facts: of its prompts.
        replayed: the iterations of it that a replay trains on.

    Raises:
        ConfigError: only the critic would learn.
    """
    rollout, train = config.rollout, config.train
    batches = [min(rollout.batch_size, facts.prompts - drawn) for drawn in range(0, facts.prompts, rollout.batch_size)]
    iterations = (batches * train.num_episodes)[: train.max_iterations][replayed]  # prompts of each
    samples = [prompts * rollout.n_samples_per_prompt for prompts in iterations]
    steps = [math.ceil(count / config.samples_per_step) * train.max_epochs for count in samples]
    frozen = config.critic.freezing_steps if config.needs_critic else 0
    if frozen and frozen >= len(iterations):
        raise ConfigError(
            f"critic.freezing_steps={frozen} leaves none of the run's {len(iterations)} iterations to the policy: lower it, or "
            "give more prompts"
        )
    return RunPlan(
        prompts=facts.prompts,
        dropped=facts.dropped,
        fingerprint=facts.fingerprint,
        iterations=len(iterations),
        total_steps=sum(steps[frozen:]),
        critic_steps=sum(steps) if config.needs_critic else 0,
    )
