"""An agent file in OpenRLHF's style: only the import line is this project's."""

import random

import torch

from rlhf_core.agents import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
        self.max_steps = 2
        self.luck = random.randint(0, 10**9)

    async def reset(self, states: dict, **kwargs):
        self.label = states["label"]
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict:
        self.step_idx += 1
        done = self.step_idx >= self.max_steps
        reward = torch.tensor(1.0) if str(self.label) in states["action_text"] else torch.tensor([0.25])
        feedback = (
            "\n\nHuman: [CORRECT]\n"
            if done
            else f"\n\nHuman: [INCORRECT]\n{len(states['observation_text'])}\n\nAssistant: "
        )
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"dummy_scores": reward, "luck": torch.tensor(self.luck)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
