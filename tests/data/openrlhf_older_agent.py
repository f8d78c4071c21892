"""An agent file in the style of older OpenRLHF versions: only the import line is this project's."""

from typing import Any

from rlhf_core.agents import AgentExecutorBase, AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.step_idx += 1
        return {
            "rewards": 0.5,
            "scores": 0.5,
            "environment_feedback": "\nagain: ",
            "done": self.step_idx == 2,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, result_queue)

    async def execute(self, prompt, label, sampling_params):
        result = await super().execute(prompt, label, sampling_params)
        result["reward"] += 10
        return result
