"""Guess the number: a game of several turns, as an environment in the style of OpenRLHF.

A number from 1 to 9 is thought of; after each guess the policy hears whether it is higher or lower. ``prompts`` are the rows,
``AgentInstance`` the game:

    data.prompt_dataset=configs/agents/guess_number.py:prompts?count=64
    train.agent_func_path=configs/agents/guess_number.py
"""

import random
from collections.abc import Iterator
from typing import Any

from rlhf_core.agents import AgentInstanceBase

LOW, HIGH = 1, 9  # one digit, so that one token of any tokenizer says a guess
FOUND = 1.0
SENSIBLE = 0.1  # a guess that what was said so far allows
MISSED = -0.1  # no number, or one that what was said so far rules out


def prompts(count: int = 64, seed: int = 0) -> Iterator[dict[str, Any]]:
    """``count`` invitations; the number itself is drawn by the game."""
    for _ in range(count):
        yield {"input": f"I think of a number from {LOW} to {HIGH}. Guess: ", "label": None}


class AgentInstance(AgentInstanceBase):
    """One game. All samples of a prompt guess the same number: their seed is the same."""

    def __init__(
        self,
        turns: int = 4,
        higher: str = " Higher. Guess: ",
        lower: str = " Lower. Guess: ",
        no_number: str = " No number. Guess: ",
    ) -> None:
        self.turns = turns
        self.higher, self.lower, self.no_number = higher, lower, no_number  # what is said to a wrong guess

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        """Think of a number."""
        self.number = random.Random(states["seed"]).randint(LOW, HIGH)
        self.low, self.high = LOW, HIGH  # where the number can still be
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        """Hear a guess."""
        self.turn += 1
        guess = self.read(states["action_text"])
        found = guess == self.number
        done = found or self.turn == self.turns
        return {
            "rewards": FOUND if found else MISSED if guess is None or not self.low <= guess <= self.high else SENSIBLE,
            "scores": float(found),
            "environment_feedback": "" if done else self.hint(guess),
            "done": done,
            "extra_logs": {"found": float(found)} if done else {},
        }

    def read(self, text: str) -> int | None:
        """The number that was said."""
        text = text.strip()
        return int(text) if text.isascii() and text.isdecimal() else None

    def hint(self, guess: int | None) -> str:
        """What is said to a wrong guess."""
        if guess is None:
            return self.no_number
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return self.higher
        self.high = min(self.high, guess - 1)
        return self.lower
