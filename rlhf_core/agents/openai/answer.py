"""What an agent says of its own episode, in whatever form, as one typed record.

=====================================  ==========================================================================
the answer                             means
=====================================  ==========================================================================
a number                               that reward; int and bool become float, numpy and torch scalars are unpacked
dict with ``reward`` (or ``rewards``)  the same; ``score`` (``scores``) where present, ``extra_logs`` become metrics
None, or a dict whose reward is None   no reward: what was posted to the session counts, else the ``reward`` section's
NaN, inf, text, another type           an error, which names it
=====================================  ==========================================================================

A list or tensor with one element stands for that element. What is no number in ``extra_logs`` is left out and counted in
the metric ``dropped_logs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.agents.environment.answers import number, plain_logs
from rlhf_core.errors import AgentError

DROPPED_LOGS = "dropped_logs"


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """The end of an episode, as its agent tells it."""

    reward: float | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    posted_later: bool = False  # the agent only took the episode on: the reward comes by a post to the session


def to_answer(value: Any, who: str) -> AgentAnswer:
    """The typed answer.

    Args:
        value: what the agent returned, printed or sent.
        who: it, for messages: ``run_agent``, a program, a URL.

    Raises:
        AgentError: it cannot be understood.
    """
    if not isinstance(value, Mapping):
        return AgentAnswer(reward=_number(value, f"the reward of {who}"))
    if not {"reward", "rewards"} & value.keys():
        raise AgentError(f"{who} answered a dict without 'reward': its keys are {sorted(map(str, value))}")
    return AgentAnswer(
        reward=_number(value.get("reward", value.get("rewards")), f"the reward of {who}"),
        score=_number(value.get("score", value.get("scores")), f"the score of {who}"),
        metrics=_metrics(value.get("extra_logs")),
    )


def _metrics(logs: Any) -> dict[str, float]:
    metrics, dropped = plain_logs(logs, _number)
    return metrics | ({DROPPED_LOGS: float(dropped)} if dropped else {})


def _number(value: Any, what: str) -> float | None:
    plain = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return None if plain is None else number(plain, what)
