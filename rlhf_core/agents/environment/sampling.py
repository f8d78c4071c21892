"""Sampling settings as OpenRLHF's files know them: an object with attributes, which may be copied and altered."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.records import SamplingParams

KEYS = {"min_tokens": "rollout.min_new_tokens", "n": "rollout.n_samples_per_prompt", "seed": "train.seed"}
TRAINERS = ("temperature", "top_p", "top_k", "min_tokens", "stop", "seed", "ignore_eos")  # not an agent's to choose


@dataclass
class TurnSampling:
    """Settings of one turn. Only ``max_tokens`` may be altered: one temperature is trained for a whole row."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = 1
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True


def as_given(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """JSON of the settings that an agent is shown."""
    chosen = {name: getattr(sampling, name) for name in TRAINERS}
    return asdict(TurnSampling(max_tokens, **(chosen | {"stop": list(sampling.stop)})))


def asked_tokens(settings: Mapping[str, Any], sampling: SamplingParams, place: str) -> int | None:
    """How many tokens settings that came back ask for; None: not said.

    Args:
        settings: what an agent made of ``as_given``; fields may be missing.
        sampling: the episode's.
        place: who gave them, for messages.

    Raises:
        AgentError: a field is unknown, or has another value than the trainer's.
    """
    given = as_given(sampling, 1)
    for name, value in settings.items():
        if name not in given:
            raise AgentError(f"{place} has the unknown field {name!r}: only max_tokens may be set there")
        if name == "max_tokens" or name in ("logprobs", "skip_special_tokens", "include_stop_str_in_output"):
            continue  # the latter change what is shown, and nothing of what is sampled
        if (list(value) if name == "stop" and value is not None else value) != given[name] and value is not None:
            raise AgentError(
                f"{place} sets {name}={value!r}, where the run samples with {given[name]!r}: only max_tokens may change "
                f"between turns, since a row is trained with one setting; set {KEYS.get(name, f'rollout.{name}')} instead"
            )
    tokens = settings.get("max_tokens")
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise AgentError(f"{place} sets max_tokens={tokens!r}: a positive number is wanted")
    return tokens
