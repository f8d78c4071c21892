"""A run's pipeline in one line, for ``rlhf config check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config.pipeline_rules import renormalising_keys

if TYPE_CHECKING:
    from rlhf_core.config import Config


def in_words(config: Config) -> str:
    """What overlaps, how old a token may be, and what is done about it."""
    if config.is_replay:
        return "replay: nothing is sampled, iterations one after the other"
    if not config.overlaps:
        turns = "synchronous, on the same GPUs by turns" if config.train.colocate_all else "synchronous"
        return f"{turns}; {_age(config.max_age)}{_correction(config)}"
    partial = ""
    if config.pauses_requests:
        partial = f"; requests go on over a weight sync (KV cache: {config.train.partial_rollout_kv})"
    if config.carries_unfinished:
        goes_on = (
            "goes on in the next" if config.rollout_lag > 1 else "mostly begins anew: raise train.async_queue_size"
        )
        partial += f"; what is unfinished when a batch is full {goes_on}"
    return f"asynchronous; {_age(config.max_age)}{_correction(config)}{partial}"


def _age(most: int | None) -> str:
    if most is None:
        return "groups that were left over are trained whatever their age"
    return f"tokens are at most {most} version{'' if most == 1 else 's'} old" if most else "every token is on-policy"


def _correction(config: Config) -> str:
    if config.corrects_mismatch and not any(renormalising_keys(config)):
        return f", corrected by {config.algo.advantage.is_correction_type}"
    return ", and not corrected" if config.rollout_lag else ""
