"""Small configurations and batches for the unit tests of training."""

from __future__ import annotations

import numpy as np
import torch

from rlhf_core.batching import MicroBatch, OptimizerStep, collate_experiences
from rlhf_core.config import parse_config
from rlhf_core.records import ActionRange, Experience


def config(*overrides):
    base = {
        "actor": {"model_name_or_path": "tiny"},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"functions": [{"use": "digits"}]},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 4},
        "ds": {"param_dtype": "fp32"},
    }
    return parse_config(base, overrides)


def experience(old, rollout=None, ref=None, advantage=1.0, constrained=False):
    """One prompt token, then one action token for each log-prob in ``old``."""

    def array(values):
        return np.array([0, *values], dtype=np.float32)

    return Experience(
        group_id="g",
        sample_index=0,
        segment_index=0,
        token_ids=np.arange(len(old) + 1, dtype=np.int32),
        action_ranges=(ActionRange(1, len(old) + 1),),
        rollout_logprobs=array(old if rollout is None else rollout),
        old_logprobs=array(old),
        ref_logprobs=None if ref is None else array(ref),
        values=None,
        advantages=array([advantage] * len(old)),
        returns=array([0] * len(old)),
        reward=0.0,
        shaped_reward=0.0,
        temperature=1.0,
        constrained=constrained,
    )


def step_of(*rows):
    """A step of these rows, each an episode, in one micro-batch of one rank."""
    micro_batches = ((MicroBatch(tuple(range(len(rows)))),),)
    return OptimizerStep(
        epoch=0, micro_batches=micro_batches, num_tokens=sum(r.num_actions for r in rows), num_sequences=len(rows)
    )


def batch_of(*rows):
    return collate_experiences(rows)


def padded(*rows):
    """Lists of action log-probs as ``[B, T]`` with a graph, 0 at the prompt token and in the padding."""
    width = 1 + max(len(row) for row in rows)
    values_BT = [[0.0, *row] + [0.0] * (width - 1 - len(row)) for row in rows]
    return torch.tensor(values_BT, requires_grad=True)
