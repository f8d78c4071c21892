"""Prompt datasets: from ``data.prompt_dataset`` (or ``eval.dataset``) to ``Prompt`` records.

    specs ──▶ rows ──▶ columns checked, row ids ──▶ rendered, overlong dropped ──▶ PromptDataset[index] ──▶ Prompt

Everything is read and rendered once at the start, so that a bad row stops the run before an engine starts. Only the
rows are kept; token ids are made again, the same ones, when a prompt is drawn.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.data import columns
from rlhf_core.data.loading import LengthLimit, Source, load
from rlhf_core.data.order import PromptOrder
from rlhf_core.data.row_list import read_row_list
from rlhf_core.data.templates import Messages, render
from rlhf_core.data.values import Row, check_json
from rlhf_core.errors import DataError
from rlhf_core.records import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.config import Config
    from rlhf_core.config.model import DataConfig
    from rlhf_core.data.row_list import RowList
    from rlhf_core.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What is kept of a row."""

    row_id: str
    datasource: str
    content: str | Messages
    tools: list[Any] | None
    label: Any  # any JSON value
    place: str


class PromptDataset:
    """Prompts of one or several datasets, laid end to end in their own order."""

    def __init__(
        self, rows: Sequence[PromptRow], sources: Sequence[Source], data: DataConfig, tokenizer: Tokenizer
    ) -> None:
        self.sources = tuple(sources)
        self._rows = rows
        self._data = data
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self._rows[index]
        rendered = render(row.content, row.tools, self._data, self._tokenizer, row.place)
        return Prompt(
            row_id=row.row_id,
            datasource=row.datasource,
            text=rendered.text,
            token_ids=rendered.token_ids,
            label=row.label,
            messages=rendered.messages,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    @property
    def overlong(self) -> int:
        """Prompts dropped because they leave no room for an answer."""
        return sum(source.overlong for source in self.sources)

    def fingerprint(self) -> str:
        """sha256, hex, over every row in its order: two runs with the same one see the same prompts."""
        sha256 = hashlib.sha256()
        for row in self._rows:
            line = json.dumps([row.row_id, row.datasource, row.content, row.tools, row.label], sort_keys=True)
            sha256.update(line.encode() + b"\n")
        return sha256.hexdigest()

    def order(self, seed: int, probs: Sequence[float] | None = None) -> PromptOrder:
        """The seeded order in which these prompts are drawn, mixed by ``probs`` (one weight per dataset) if given."""
        return PromptOrder([source.size for source in self.sources], seed, probs)


def training_prompts(config: Config, tokenizer: Tokenizer) -> PromptDataset:
    """The prompts of ``data.prompt_dataset``; their order is ``.order(train.seed, data.prompt_probs)``."""
    data = config.data
    return load_prompts(
        data.prompt_dataset,
        data.prompt_split,
        data,
        tokenizer,
        _max_prompt_len(config),
        data.max_samples,
        read_row_list(data.only_rows, config.storage) if data.only_rows is not None else None,
    )


def evaluation_prompts(config: Config, tokenizer: Tokenizer) -> PromptDataset:
    """The prompts of ``eval.dataset``, with the columns and templates of ``data``."""
    evaluation = config.eval
    return load_prompts(
        evaluation.dataset, evaluation.split, config.data, tokenizer, _max_prompt_len(config), evaluation.max_samples
    )


def load_prompts(
    specs: Sequence[str],
    split: str,
    data: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_len: int,
    max_samples: int | None = None,
    only: RowList | None = None,
) -> PromptDataset:
    """Read, check and render every row.

    Args:
        specs: Datasets, as in ``data.prompt_dataset``.
        split: Split of Hugging Face datasets.
        data: Columns, templates, and what becomes of overlong prompts.
        tokenizer: Of the policy.
        max_prompt_len: Longest prompt that leaves room for an answer, tokens.
        max_samples: Use only the first rows of each dataset.
        only: Use only these rows.

    Raises:
        DataError: A dataset or a row of it cannot be used, a row id comes twice, a dataset has no prompt left, or one of
            ``only`` is not there.
    """

    def make(row: Row, name: str) -> tuple[PromptRow, int]:
        kept = _prompt_row(row, name, data)
        return kept, len(render(kept.content, kept.tools, data, tokenizer, kept.place).token_ids)

    limit = LengthLimit(
        tokens=max_prompt_len,
        overlong=data.overlong,
        noun="prompt",
        meaning="data.max_len - rollout.max_new_tokens",
        remedy="raise data.max_len, or lower rollout.max_new_tokens",
    )
    rows, sources = load(specs, split, limit, make, id_key=data.id_key, max_samples=max_samples, only=only)
    return PromptDataset(rows, sources, data, tokenizer)


def _max_prompt_len(config: Config) -> int:
    return config.data.max_len - config.rollout.max_new_tokens


def _prompt_row(row: Row, name: str, data: DataConfig) -> PromptRow:
    _refuse_images(row, data)
    return PromptRow(
        row_id=columns.row_id(row, name, data.id_key),
        datasource=columns.datasource(row, name),
        content=columns.text_or_messages(row, data.input_key, "data.input_key", "prompt"),
        tools=columns.tools(row, data.tools_key),
        label=_label(row, data),
        place=row.place,
    )


def _label(row: Row, data: DataConfig) -> Any:
    if data.label_key is None:
        return None
    remedy = "name the label's column, or set it to null for none"
    label = columns.column(row, data.label_key, "data.label_key", remedy)
    check_json(label, data.label_key, row.place)
    return label


def _refuse_images(row: Row, data: DataConfig) -> None:
    if row.values.get(data.image_key) and data.max_images_per_prompt == 0:
        raise DataError(
            f"{row.place}: column {data.image_key!r} holds images, but data.max_images_per_prompt=0 reads text only: "
            "remove the column, or set data.image_key to another name"
        )
