"""A row in the making: the ids as the engine saw and said them, and what is known of each.

::

    Segment(prompt) ─▶ act(generation) ─▶ reward(.2) ─▶ hear(feedback) ─▶ act(generation) ─▶ … ─▶ trajectory(stop)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.errors import GenerationError
from rlhf_core.records import ActionRange, StepReward, Trajectory, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.agents.episode import Episode, Tokenizer
    from rlhf_core.records import Generation, ImageRef, StopReason

IMAGE_TEXT = "[image]"  # stands for an image's placeholder tokens in texts that people read


class Segment:
    """Tokens of one conversation as far as each turn's begin with all that were before it."""

    def __init__(self, token_ids: Sequence[int], images: Sequence[ImageRef] = ()) -> None:
        self.token_ids = list(token_ids)
        self.images = list(images)
        self.action_ranges: list[ActionRange] = []
        self._logprobs = [0.0] * len(self.token_ids)
        self._version_spans: list[VersionSpan] = []
        self._step_rewards: list[StepReward] = []

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        images: Sequence[ImageRef],
        action_ranges: Sequence[ActionRange],
        logprobs: Sequence[float],
        version_spans: Sequence[VersionSpan],
    ) -> Segment:
        """One that is complete. ``logprobs``: [T], as many as ``token_ids``."""
        segment = cls(token_ids, images)
        segment.action_ranges = list(action_ranges)
        segment._logprobs = list(logprobs)
        segment._version_spans = list(version_spans)
        return segment

    def __len__(self) -> int:
        return len(self.token_ids)

    def act(self, generation: Generation) -> None:
        """The policy spoke.

        Raises:
            GenerationError: a token, its log-prob or its policy version is missing.
        """
        check_generation(generation)
        start = len(self)
        self.token_ids += generation.token_ids
        self._logprobs += generation.logprobs
        self.action_ranges.append(ActionRange(start, len(self)))
        for span in generation.version_spans:
            self._version_spans.append(VersionSpan(start + span.start, start + span.end, span.version))

    def hear(self, token_ids: Sequence[int], images: Sequence[ImageRef] = ()) -> None:
        """The environment spoke; positions of images start with these ids."""
        offset = len(self)
        self.images += [image._replace(start=image.start + offset, end=image.end + offset) for image in images]
        self.token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)

    def reward(self, reward: float) -> None:
        """What the last action earned, kept at its last token."""
        self._step_rewards.append(StepReward(self.action_ranges[-1].end - 1, reward))

    def text(self, tokenizer: Tokenizer, start: int = 0, end: int | None = None) -> str:
        """The text of tokens ``[start, end)``, special tokens included; images are ``[image]``."""
        end = len(self) if end is None else end
        pieces, done = [], start
        for image in self.images:
            if start <= image.start and image.end <= end:
                pieces += [decode(tokenizer, self.token_ids[done : image.start]), IMAGE_TEXT]
                done = image.end
        return "".join([*pieces, decode(tokenizer, self.token_ids[done:end])])

    def transcript(self, tokenizer: Tokenizer) -> str:
        """The text from the first action to the last one, where there are several."""
        if len(self.action_ranges) < 2:
            return ""
        return self.text(tokenizer, self.action_ranges[0].start, self.action_ranges[-1].end)

    def trajectory(self, episode: Episode, stop_reason: StopReason, **fields: Any) -> Trajectory:
        """The row. ``fields``: of ``Trajectory``, besides those that the tokens and the episode say."""
        prompt = episode.prompt
        said: dict[str, Any] = {
            "run_id": episode.run_id,
            "iteration": episode.iteration,
            "round": episode.round,
            "prompt_id": prompt.row_id,
            "group_id": episode.group_id,
            "sample_index": episode.sample_index,
            "datasource": prompt.datasource,
            "prompt": prompt.text,
            "label": prompt.label,
            "messages": prompt.messages,
            "token_ids": np.asarray(self.token_ids, dtype=np.int32),
            "action_ranges": tuple(self.action_ranges),
            "rollout_logprobs": np.asarray(self._logprobs, dtype=np.float32),
            "version_spans": tuple(self._version_spans),
            "step_rewards": tuple(self._step_rewards),
            "stop_reason": stop_reason,
            "sampling": episode.sampling,
            "images": tuple(self.images),
        }
        return Trajectory(**(said | fields))


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Text of the ids, special tokens included."""
    return tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def check_generation(generation: Generation) -> None:
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
