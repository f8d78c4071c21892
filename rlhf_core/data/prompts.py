"""Prompt datasets: from ``data.prompt_dataset`` (or ``eval.dataset``) to ``Prompt`` records.

    specs ──▶ rows ──▶ columns checked, row ids ──▶ rendered, overlong dropped ──▶ PromptDataset[index] ──▶ Prompt

Everything is read and rendered once at the start, so that a bad row stops the run before an engine starts. Only the
rows are kept; token ids are made again, the same ones, when a prompt is drawn.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rlhf_core.data.order import PromptOrder
from rlhf_core.data.sources import read_rows, source_names
from rlhf_core.data.templates import Messages, render
from rlhf_core.data.values import Row, check_json, check_text
from rlhf_core.errors import DataError
from rlhf_core.records import Prompt
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.config import Config
    from rlhf_core.config.model import DataConfig
    from rlhf_core.data.tokenizer import Tokenizer

logger = get_logger(__name__)

DATASOURCE_COLUMN = "datasource"  # names the source of a single row; wins over the dataset's name


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What is kept of a row."""

    row_id: str
    datasource: str
    content: str | Messages
    tools: list[Any] | None
    label: Any  # any JSON value
    place: str


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One dataset of several, after the overlong prompts were dropped."""

    name: str
    size: int  # rows kept
    overlong: int  # rows dropped


class PromptDataset:
    """Prompts of one or several datasets, laid end to end in their own order."""

    def __init__(
        self, rows: Sequence[PromptRow], sources: Sequence[PromptSource], data: DataConfig, tokenizer: Tokenizer
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
        data.prompt_dataset, data.prompt_split, data, tokenizer, _max_prompt_len(config), data.max_samples
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
) -> PromptDataset:
    """Read, check and render every row.

    Args:
        specs: Datasets, as in ``data.prompt_dataset``.
        split: Split of Hugging Face datasets.
        data: Columns, templates, and what becomes of overlong prompts.
        tokenizer: Of the policy.
        max_prompt_len: Longest prompt that leaves room for an answer, tokens.
        max_samples: Use only the first rows of each dataset.

    Raises:
        DataError: A dataset or a row of it cannot be used, a row id comes twice, or a dataset has no prompt left.
    """
    rows: list[PromptRow] = []
    sources: list[PromptSource] = []
    places: dict[str, str] = {}  # row id -> place
    for spec, name in zip(specs, source_names(specs), strict=True):
        kept, overlong = 0, 0
        for row in itertools.islice(read_rows(spec, split), max_samples):
            prompt_row = _prompt_row(row, name, data)
            _check_unique(prompt_row, places, data)
            if _fits(prompt_row, data, tokenizer, max_prompt_len):
                rows.append(prompt_row)
                kept += 1
            else:
                overlong += 1
        sources.append(_source(spec, name, kept, overlong, max_prompt_len))
    return PromptDataset(rows, sources, data, tokenizer)


def _max_prompt_len(config: Config) -> int:
    return config.data.max_len - config.rollout.max_new_tokens


def _source(spec: str, name: str, kept: int, overlong: int, max_prompt_len: int) -> PromptSource:
    if kept == 0 and overlong == 0:
        raise DataError(f"{spec} has no rows: fill it, or take it out of the list of datasets")
    if kept == 0:
        raise DataError(
            f"{spec}: all {overlong} prompts are longer than {max_prompt_len} tokens (data.max_len - "
            "rollout.max_new_tokens): raise data.max_len, or lower rollout.max_new_tokens"
        )
    if overlong:
        logger.warning("%s: dropped %d of %d prompts over %d tokens", spec, overlong, kept + overlong, max_prompt_len)
    return PromptSource(name, kept, overlong)


def _fits(row: PromptRow, data: DataConfig, tokenizer: Tokenizer, max_prompt_len: int) -> bool:
    length = len(render(row.content, row.tools, data, tokenizer, row.place).token_ids)
    if length > max_prompt_len and data.overlong == "error":
        raise DataError(
            f"{row.place}: the prompt has {length} tokens, and {max_prompt_len} (data.max_len - "
            "rollout.max_new_tokens) leave room for an answer: raise data.max_len, or set data.overlong=drop"
        )
    return length <= max_prompt_len


def _check_unique(row: PromptRow, places: dict[str, str], data: DataConfig) -> None:
    if row.row_id in places:
        raise DataError(
            f"{row.place}: its row id {row.row_id!r} is that of {places[row.row_id]} too: make the ids of "
            f"data.id_key={data.id_key!r} unique, or set it to null to number the rows"
        )
    places[row.row_id] = row.place


def _prompt_row(row: Row, name: str, data: DataConfig) -> PromptRow:
    _refuse_images(row, data)
    return PromptRow(
        row_id=_row_id(row, name, data),
        datasource=_datasource(row, name),
        content=_content(row, data),
        tools=_tools(row, data),
        label=_label(row, data),
        place=row.place,
    )


def _column(row: Row, column: str, key: str, remedy: str) -> Any:
    if column not in row.values:
        raise DataError(
            f"{row.place}: no column {column!r} ({key}); it has {', '.join(row.values) or 'none'}: {remedy}"
        )
    return row.values[column]


def _content(row: Row, data: DataConfig) -> str | Messages:
    content = _column(row, data.input_key, "data.input_key", "set data.input_key to the prompt's column")
    if isinstance(content, str):
        check_text(content, data.input_key, row.place)
        blank = _is_blank(content)
    else:
        blank = all(_is_blank(message.get("content")) for message in _messages(content, data.input_key, row.place))
    if blank:
        raise DataError(f"{row.place}: column {data.input_key!r} is empty or only white space: fill or remove the row")
    return cast("str | Messages", content)


def _is_blank(content: Any) -> bool:
    return not (content.strip() if isinstance(content, str) else content)


def _messages(content: Any, column: str, place: str) -> Messages:
    check_json(content, column, place)
    if not isinstance(content, list):
        raise DataError(
            f"{place}: column {column!r} holds a {type(content).__name__}: a prompt is text, or a list of chat messages"
        )
    for message in content:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f'{place}: column {column!r} holds the message {message!r}: write {{"role": ..., "content": ...}}'
            )
    return content


def _label(row: Row, data: DataConfig) -> Any:
    if data.label_key is None:
        return None
    label = _column(row, data.label_key, "data.label_key", "name the label's column, or set it to null for none")
    check_json(label, data.label_key, row.place)
    return label


def _tools(row: Row, data: DataConfig) -> list[Any] | None:
    """The row's tool schemas: a list, or its JSON text (an Arrow column cannot hold schemas of unlike shapes)."""
    tools = row.values.get(data.tools_key)
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(
                f"{row.place}: column {data.tools_key!r} is not readable as JSON: {error}; repair it"
            ) from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(
            f"{row.place}: column {data.tools_key!r} holds a {type(tools).__name__}: give a list of tool schemas"
        )
    check_json(tools, data.tools_key, row.place)
    return tools


def _row_id(row: Row, name: str, data: DataConfig) -> str:
    if data.id_key is None:
        return f"{name}:{row.number}"
    row_id = _column(row, data.id_key, "data.id_key", "name the id's column, or set it to null to number the rows")
    if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise DataError(f"{row.place}: column {data.id_key!r} holds {row_id!r}: a row id is text or a whole number")
    check_text(str(row_id), data.id_key, row.place)
    return str(row_id)


def _datasource(row: Row, name: str) -> str:
    datasource = row.values.get(DATASOURCE_COLUMN, name)
    if not isinstance(datasource, str) or not datasource.strip():
        raise DataError(f"{row.place}: column {DATASOURCE_COLUMN!r} holds {datasource!r}: write the source's name")
    check_text(datasource, DATASOURCE_COLUMN, row.place)
    return datasource


def _refuse_images(row: Row, data: DataConfig) -> None:
    if row.values.get(data.image_key) and data.max_images_per_prompt == 0:
        raise DataError(
            f"{row.place}: column {data.image_key!r} holds images, but data.max_images_per_prompt=0 reads text only: "
            "remove the column, or set data.image_key to another name"
        )
