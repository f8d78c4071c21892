"""One prompt, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.agents.executor import AgentExecutorBase
from rlhf_core.errors import GenerationError
from rlhf_core.records import ActionRange, GenerateRequest, Generation, Trajectory, VersionSpan

if TYPE_CHECKING:
    from rlhf_core.agents.episode import Episode


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
        _check(generation)
        start = len(prompt.token_ids)
        end = start + len(generation.token_ids)
        logprobs = np.zeros(end, dtype=np.float32)
        logprobs[start:] = generation.logprobs
        return [
            Trajectory(
                run_id=episode.run_id,
                iteration=episode.iteration,
                round=episode.round,
                prompt_id=prompt.row_id,
                group_id=episode.group_id,
                sample_index=episode.sample_index,
                datasource=prompt.datasource,
                prompt=prompt.text,
                label=prompt.label,
                messages=prompt.messages,
                token_ids=np.asarray([*prompt.token_ids, *generation.token_ids], dtype=np.int32),
                action_ranges=(ActionRange(start, end),),
                rollout_logprobs=logprobs,
                version_spans=tuple(
                    VersionSpan(start + span.start, start + span.end, span.version) for span in generation.version_spans
                ),
                stop_reason=generation.stop_reason,
                sampling=episode.sampling,
                answer=episode.tokenizer.decode(generation.token_ids, skip_special_tokens=True),
                images=prompt.images,
            )
        ]


def _check(generation: Generation) -> None:
    """A completion without tokens, or without a number and a version for each, must not become a training row."""
    tokens = len(generation.token_ids)
    if tokens == 0:
        raise GenerationError(f"request {generation.request_id}: the engine returned no token")
    if len(generation.logprobs) != tokens:
        raise GenerationError(
            f"request {generation.request_id}: {len(generation.logprobs)} log-probs for {tokens} tokens; "
            "a missing log-prob is never a default"
        )
    bad = np.flatnonzero(~np.isfinite(np.array(generation.logprobs, dtype=np.float64)))  # None becomes NaN here
    if bad.size:
        raise GenerationError(
            f"request {generation.request_id}: the log-prob of token {bad[0]} is {generation.logprobs[bad[0]]}"
        )
    covered = sum(span.end - span.start for span in generation.version_spans)
    if covered != tokens:
        raise GenerationError(f"request {generation.request_id}: policy versions cover {covered} of {tokens} tokens")
