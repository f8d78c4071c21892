"""An agent file in OpenRLHF's style that answers pictures: only the import line is this project's."""

import torch
from PIL import Image

from rlhf_core.agents import AgentInstanceBase, MultiTurnAgentExecutor

COLOURS = ["red", "green", "blue"]


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    def step(self, states: dict, **kwargs):
        colour = COLOURS[self.step_idx % 3]
        self.step_idx += 1
        right = colour in states["action_text"]
        picture = Image.new("RGB", (32, 24), COLOURS[self.step_idx % 3])
        return {
            "rewards": torch.tensor(float(right)),
            "scores": torch.tensor(float(right)),
            "environment_feedback": "\n<image>\nUSER: and this?\nASSISTANT: ",
            "environment_images": [picture],
            "done": self.step_idx >= 2,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"right": torch.tensor([float(right)])},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
