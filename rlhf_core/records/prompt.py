"""A prompt, and a position in the order of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.records.trajectory import ImageRef


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt dataset, ready for an engine."""

    row_id: str  # stable within the dataset: the id column, or "<datasource>:<row number>"
    datasource: str
    text: str  # the rendered prompt, for people and reward functions
    token_ids: list[int]  # [T]
    label: Any = None  # any JSON value, type kept
    messages: Any = None  # the chat messages that were rendered; None where the prompt is plain text
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class PromptCursor:
    """A position in the seeded order: ``offset`` prompts of epoch ``epoch`` have been drawn."""

    epoch: int = 0
    offset: int = 0

    @property
    def group_id(self) -> str:
        """Names the group of the prompt that is drawn here; ids sort in the order of draws."""
        return f"{self.epoch:04d}-{self.offset:08d}"

    @classmethod
    def of_group(cls, group_id: str) -> PromptCursor:
        """Where the prompt of a group was drawn: the inverse of ``group_id``."""
        epoch, offset = group_id.split("-")
        return cls(int(epoch), int(offset))
