"""One prompt, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.agents.executor import AgentExecutorBase
from rlhf_core.agents.segment import Segment
from rlhf_core.records import GenerateRequest

if TYPE_CHECKING:
    from rlhf_core.agents.episode import Episode
    from rlhf_core.records import Trajectory


class SingleTurnAgentExecutor(AgentExecutorBase):
    """The whole answer is one action; the stop token, where the policy said one, belongs to it."""

    async def execute(self, episode: Episode) -> list[Trajectory]:
        """See the base class."""
        prompt = episode.prompt
        generation = await episode.generate.generate(
            GenerateRequest(
                request_id=episode.request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=episode.sampling,
                affinity=episode.group_id,
                images=prompt.images,
            )
        )
        segment = Segment(prompt.token_ids, prompt.images)
        segment.act(generation)
        answer = episode.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        return [segment.trajectory(episode, generation.stop_reason, answer=answer)]
