"""Prompt datasets: from ``data.prompt_dataset`` (or ``eval.dataset``) to ``Prompt`` records.

    specs ──▶ rows ──▶ columns checked, row ids ──▶ rendered, overlong dropped ──▶ PromptDataset[index] ──▶ Prompt

Everything is read and rendered once at the start, so that a bad row stops the run before an engine starts. Only the
rows are kept; token ids are made again, the same ones, when a prompt is drawn. Images are looked at at the start, and
stored when a prompt that shows them is drawn (``images``).
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.data import columns
from rlhf_core.data.image_parts import as_parts, images_of_column, shows_images
from rlhf_core.data.images import PromptImages, image_limits
from rlhf_core.data.loading import THREADS, LengthLimit, Source, load
from rlhf_core.data.order import PromptOrder
from rlhf_core.data.prompt_tools import check_results_told, check_shown, row_tools
from rlhf_core.data.row_list import read_row_list
from rlhf_core.data.templates import Chat, Messages, RenderedPrompt, Sight, render
from rlhf_core.data.values import Row, check_json
from rlhf_core.errors import DataError
from rlhf_core.records import ImageRef, Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.config import Config
    from rlhf_core.config.model import DataConfig
    from rlhf_core.data.images import ImageKeeper, PromptImage
    from rlhf_core.data.row_list import RowList
    from rlhf_core.data.tokenizer import Tokenizer
    from rlhf_core.vision import VisionProcessor


@dataclass(frozen=True, slots=True)
class Vision:
    """What prompts with images need."""

    processor: VisionProcessor  # of the policy
    keeper: ImageKeeper  # of the run


@dataclass(frozen=True, slots=True)
class PromptRow:
    """What is kept of a row."""

    row_id: str
    datasource: str
    content: str | Messages
    tools: list[Any] | None
    label: Any  # any JSON value
    place: str
    images: tuple[PromptImage, ...] = ()

    def rendered(self, data: DataConfig, tokenizer: Tokenizer, vision: Vision | None) -> RenderedPrompt:
        """Its text and token ids."""
        sight = None if vision is None else Sight(vision.processor, [image.size for image in self.images])
        return render(self.content, self.tools, data, tokenizer, self.place, sight)


class PromptDataset:
    """Prompts of one or several datasets, laid end to end in their own order."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        sources: Sequence[Source],
        data: DataConfig,
        tokenizer: Tokenizer,
        vision: Vision | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """``images``: where those of the rows can be read again, if there may be some."""
        self.sources = tuple(sources)
        self._vision = vision
        self._images = images
        self._rows = rows
        self._data = data
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self._rows[index]
        rendered = row.rendered(self._data, self._tokenizer, self._vision)
        return Prompt(
            row_id=row.row_id,
            datasource=row.datasource,
            text=rendered.text,
            token_ids=rendered.token_ids,
            label=row.label,
            messages=rendered.messages,
            images=tuple(
                ImageRef(image.sha256, self._kept(image), *span)
                for image, span in zip(row.images, rendered.spans, strict=True)
            ),
        )

    def keep_images(self, indices: Sequence[int]) -> None:
        """Make the images of some prompts durable, several at once: drawing them then waits for nothing."""
        shown = {image.sha256: image for index in indices for image in self._rows[index].images}
        if shown:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="images") as pool:
                list(pool.map(self._kept, shown.values()))

    def _kept(self, image: PromptImage) -> str:
        """Where the image lies in the run's storage; it does from now on."""
        assert self._vision is not None, "rows without images have none to keep"
        assert self._images is not None, "rows without images have none to read"
        again = self._images.again
        return self._vision.keeper.keep(image.sha256, lambda: again(image))

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
            seen = [image.sha256 for image in row.images]
            of_row = [row.row_id, row.datasource, row.content, row.tools, row.label, *([seen] if seen else [])]
            sha256.update(json.dumps(of_row, sort_keys=True).encode() + b"\n")
        return sha256.hexdigest()

    def order(self, seed: int, probs: Sequence[float] | None = None) -> PromptOrder:
        """The seeded order in which these prompts are drawn, mixed by ``probs`` (one weight per dataset) if given."""
        return PromptOrder([source.size for source in self.sources], seed, probs)


def training_prompts(
    config: Config, tokenizer: Tokenizer, tools: Sequence[Any] = (), vision: Vision | None = None
) -> PromptDataset:
    """The prompts of ``data.prompt_dataset``; their order is ``.order(train.seed, data.prompt_probs)``.

    Args:
        config: The run's.
        tokenizer: Of the policy.
        tools: Schemas of ``agent.tools``, which each prompt is rendered with.
        vision: Of a policy that may see images (``data.max_images_per_prompt``).
    """
    data = config.data
    return load_prompts(
        data.prompt_dataset,
        data.prompt_split,
        data,
        tokenizer,
        _max_prompt_len(config),
        data.max_samples,
        read_row_list(data.only_rows, config.storage) if data.only_rows is not None else None,
        tools,
        vision,
    )


def evaluation_prompts(
    config: Config, tokenizer: Tokenizer, tools: Sequence[Any] = (), vision: Vision | None = None
) -> PromptDataset:
    """The prompts of ``eval.dataset``, with the columns and templates of ``data``; the rest as in ``training_prompts``."""
    evaluation = config.eval
    return load_prompts(
        evaluation.dataset,
        evaluation.split,
        config.data,
        tokenizer,
        _max_prompt_len(config),
        evaluation.max_samples,
        tools=tools,
        vision=vision,
    )


def load_prompts(
    specs: Sequence[str],
    split: str,
    data: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_len: int,
    max_samples: int | None = None,
    only: RowList | None = None,
    tools: Sequence[Any] = (),
    vision: Vision | None = None,
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
        tools: Tool schemas of all rows; none may have its own.
        vision: None: the policy reads text only, and rows with images are refused.

    Raises:
        DataError: A dataset, a row of it or one of its images cannot be used, a row id comes twice, a dataset has no prompt
            left, one of ``only`` is not there, or the chat template does not know ``tools``.
    """
    images = None if vision is None else PromptImages(image_limits(data))

    def make(row: Row, name: str) -> tuple[PromptRow, int]:
        kept = _prompt_row(row, name, data, tools, seen=images is not None)
        return kept, len(kept.rendered(data, tokenizer, vision).token_ids)

    def look(row: Row) -> Row:
        assert images is not None, "rows are looked at for their images"
        return _looked_at(row, data, images)

    limit = LengthLimit(
        tokens=max_prompt_len,
        overlong=data.overlong,
        noun="prompt",
        meaning="data.max_len - rollout.max_new_tokens",
        remedy="raise data.max_len, or lower rollout.max_new_tokens",
    )
    rows, sources = load(
        specs,
        split,
        limit,
        make,
        id_key=data.id_key,
        max_samples=max_samples,
        only=only,
        prepare=None if images is None else look,
    )
    if tools:
        _check_template(rows[0], tools, data, tokenizer, vision)
    return PromptDataset(rows, sources, data, tokenizer, vision, images)


def _max_prompt_len(config: Config) -> int:
    return config.data.max_len - config.rollout.max_new_tokens


def _looked_at(row: Row, data: DataConfig, images: PromptImages) -> Row:
    """The row with its prompt as messages of parts, and what is kept of its images in place of their column."""
    content = _content(row, data)
    column = images_of_column(row.values.get(data.image_key))
    if not column and not shows_images(content):
        return replace(row, values={**row.values, data.image_key: ()})
    if not data.apply_chat_template:
        raise DataError(f"{row.place}: images need data.apply_chat_template=true, whose template says where they go")
    messages, sources = as_parts(content, column, data.system_prompt, row.place)
    if len(sources) > data.max_images_per_prompt:
        raise DataError(
            f"{row.place}: {len(sources)} images, and data.max_images_per_prompt={data.max_images_per_prompt}: raise it, or "
            "take images out"
        )
    looked = tuple(images.look(source, row.place) for source in sources)
    return replace(row, values={**row.values, data.input_key: messages, data.image_key: looked})


def _content(row: Row, data: DataConfig) -> str | Messages:
    return columns.text_or_messages(row, data.input_key, "data.input_key", "prompt")


def _prompt_row(row: Row, name: str, data: DataConfig, tools: Sequence[Any], *, seen: bool) -> PromptRow:
    """``seen``: the row was looked at for its images; else it must not have any."""
    content = _content(row, data)
    if not seen:
        _refuse_images(row, content, data)
    return PromptRow(
        row_id=columns.row_id(row, name, data.id_key),
        datasource=columns.datasource(row, name),
        content=content,
        tools=row_tools(row, data, tools),
        label=_label(row, data),
        place=row.place,
        images=row.values[data.image_key] if seen else (),
    )


def _check_template(
    row: PromptRow, tools: Sequence[Any], data: DataConfig, tokenizer: Tokenizer, vision: Vision | None
) -> None:
    """The chat template knows tools."""

    def rendered(given: list[Any] | None) -> RenderedPrompt:
        return replace(row, tools=given).rendered(data, tokenizer, vision)

    check_shown(rendered, tools, row.place)
    template = data.tokenizer_chat_template or (vision.processor.chat_template if vision is not None else None)
    messages = rendered(row.tools).messages
    assert messages is not None, "tools need a chat template"
    check_results_told(Chat(tokenizer, template, row.tools, row.place), messages, tools[0]["function"]["name"])


def _label(row: Row, data: DataConfig) -> Any:
    if data.label_key is None:
        return None
    remedy = "name the label's column, or set it to null for none"
    label = columns.column(row, data.label_key, "data.label_key", remedy)
    check_json(label, data.label_key, row.place)
    return label


def _refuse_images(row: Row, content: str | Messages, data: DataConfig) -> None:
    if images_of_column(row.values.get(data.image_key)):
        raise DataError(
            f"{row.place}: column {data.image_key!r} holds images, but data.max_images_per_prompt=0 reads text only: "
            "remove the column, or set data.image_key to another name"
        )
    if shows_images(content):
        raise DataError(
            f"{row.place}: the prompt has image parts, but data.max_images_per_prompt=0 reads text only: remove them, or raise "
            "it for a policy that sees"
        )
