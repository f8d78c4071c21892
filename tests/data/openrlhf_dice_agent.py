"""An agent file in OpenRLHF's style, with an ``async`` __init__ and a helper class: only the import line is this project's."""

import asyncio
from typing import Any

import numpy as np
import torch

from rlhf_core.agents import AgentInstanceBase, MultiTurnAgentExecutor

MAX_STEPS = 3


class Dice:
    def __init__(self, sides):
        self.sides = sides

    def roll(self):
        return int(np.random.randint(1, self.sides + 1))


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        await asyncio.sleep(0)
        self.dice = Dice(6)
        self.step_idx = 0
        self.lock = asyncio.Lock()

    async def reset(self, states: dict, **kwargs):
        self.target = self.dice.roll()
        return {"observation": states["observation"] + f"({states['label']}) "}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        async with self.lock:
            self.step_idx += 1
        hit = str(self.target) in states["action_text"]
        done = hit or self.step_idx >= MAX_STEPS
        reward = torch.tensor(1.0 if hit else 0.0, dtype=torch.bfloat16)
        sampling_params = states["sampling_params"]
        sampling_params.max_tokens = 4
        return {
            "rewards": reward,
            "scores": torch.tensor([float(hit)]),
            "environment_feedback": f" no, roll {self.dice.roll()}: " if not done else "",
            "done": torch.tensor(done),
            "sampling_params": sampling_params,
            "extra_logs": {
                "hit": np.float32(hit),
                "steps": torch.tensor([self.step_idx]),
                "words": states["action_text"],
            },
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
