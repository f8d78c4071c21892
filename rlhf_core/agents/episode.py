"""One attempt at one prompt, and the group of attempts that are compared with each other.

::

    Prompt ──▶ Episode (one a sample) ──▶ executor ──▶ Trajectory (one a segment)
                       └── whatever goes wrong ──▶ Trajectory with stop_reason=error, never trained
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhf_core.errors import GenerationError, WorkerError
from rlhf_core.records import (
    AgentServer,
    Generate,
    ImageRef,
    Prompt,
    RewardStatus,
    SamplingParams,
    StopReason,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.agents.executor import AgentExecutorBase


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that executors use."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Ids of the text; special tokens written in it become their ids."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of the ids."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Chat messages to text or token ids."""
        ...


class ImageIntake(Protocol):
    """Takes the images of environment feedback in."""

    @property
    def placeholder(self) -> str:
        """What the model's chat template writes where an image goes."""
        ...

    async def tokenise(self, text: str, images: Sequence[bytes]) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Token ids of a text with one placeholder an image, and the images, by then stored for good.

        Args:
            text: with the model's own placeholder (as its chat template writes it) once for each image, in order.
            images: files in any format that Pillow reads.

        Returns:
            The expanded ids, and where each image is in them (positions start at 0 with the first of these ids). Without
            images a placeholder is text like other.

        Raises:
            DataError: an image cannot be read, or placeholders and images differ in number.
        """
        ...


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """What bounds an episode of several turns, besides the tokens of all turns and the context."""

    max_turns: int
    max_turn_tokens: int  # of one turn; ``Episode.sampling.max_tokens`` is for all turns together


@dataclass(frozen=True, slots=True)
class Episode:
    """What an executor gets: everything that identifies one sample, and the two things it may use."""

    run_id: str
    iteration: int
    prompt: Prompt
    group_id: str
    sample_index: int
    sampling: SamplingParams
    max_len: int  # prompt plus everything after it, tokens
    generate: Generate
    tokenizer: Tokenizer
    round: int = 0
    environment_seed: int = 0  # the same for all samples of a prompt: they are compared on one task
    end_ids: frozenset[int] = frozenset()  # every token id that ends a turn of the policy's
    limits: TurnLimits | None = None  # None: the one turn of a single-turn executor
    chat_template: str | None = None  # that replaces the tokenizer's own
    tools: tuple[Any, ...] = ()  # schemas of the agent's tools, for the chat template
    images: ImageIntake | None = None  # None: the model reads text only
    server: AgentServer | None = None  # None: no OpenAI-compatible server runs

    @property
    def request_id(self) -> str:
        """Unique within the run while the episode lives."""
        return f"{self.iteration}-{self.round}-{self.group_id}-{self.sample_index}"


async def run_group(executor: AgentExecutorBase, episodes: Sequence[Episode]) -> list[Trajectory]:
    """All segments of all samples of one prompt, in sample order.

    Raises:
        WorkerError: an engine is gone. That is no fault of a sample: the stage heals and asks again.
    """
    samples = [asyncio.ensure_future(run_episode(executor, episode)) for episode in episodes]
    try:
        rows = await asyncio.gather(*samples)
    finally:
        for sample in samples:  # gather leaves the others running when one raises
            sample.cancel()
    return [row for segments in rows for row in segments]


async def run_episode(executor: AgentExecutorBase, episode: Episode) -> list[Trajectory]:
    """One sample: its segments, or one row that says why there are none.

    A failure of this sample (its environment, its request) is recorded, and the group goes on with the rest.
    """
    started_at, start = time.time(), time.monotonic()
    try:
        segments = await executor.execute(episode)
        if not segments:
            raise GenerationError(f"{type(executor).__name__} returned no trajectory")
    except WorkerError:
        raise
    except Exception as error:  # noqa: BLE001  user code may raise anything; the recorded failure is the point
        segments = [failed_trajectory(episode, error)]
    seconds = time.monotonic() - start
    return [replace(segment, started_at=started_at, seconds=seconds) for segment in segments]


def failed_trajectory(episode: Episode, error: BaseException) -> Trajectory:
    """The record of a sample that failed: the prompt, no action, and the reason."""
    ids = np.asarray(episode.prompt.token_ids, dtype=np.int32)
    return Trajectory(
        run_id=episode.run_id,
        iteration=episode.iteration,
        round=episode.round,
        prompt_id=episode.prompt.row_id,
        group_id=episode.group_id,
        sample_index=episode.sample_index,
        datasource=episode.prompt.datasource,
        prompt=episode.prompt.text,
        label=episode.prompt.label,
        messages=episode.prompt.messages,
        token_ids=ids,
        action_ranges=(),
        rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
        version_spans=(),
        stop_reason=StopReason.ERROR,
        error=f"{type(error).__name__}: {error}",
        sampling=episode.sampling,
        reward_status=RewardStatus.SKIPPED,
        images=episode.prompt.images,
    )
