"""Every row of several datasets, checked and measured at the start, so that a bad one stops the run before it costs."""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from rlhf_core.data import columns
from rlhf_core.data.sources import read_rows, source_names
from rlhf_core.errors import DataError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from rlhf_core.data.row_list import RowList
    from rlhf_core.data.values import Row

logger = get_logger(__name__)

THREADS = 8  # that read images: downloads wait for a server, and decoding lets other threads go on
ROWS_AHEAD = 2 * THREADS  # what bounds the memory


class Identified(Protocol):
    """An item that knows its row."""

    @property
    def row_id(self) -> str:
        """Stable within the datasets, and different for each row."""
        ...


ItemT = TypeVar("ItemT", bound=Identified)


@dataclass(frozen=True, slots=True)
class Source:
    """One dataset of several, after the overlong rows were dropped."""

    name: str
    size: int  # rows kept
    overlong: int  # rows dropped


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The longest row that is kept, and what to say of a longer one."""

    tokens: int
    overlong: Literal["drop", "error"]
    noun: str  # what is measured: "prompt"
    meaning: str  # where the number comes from: "data.max_len - rollout.max_new_tokens"
    remedy: str  # "raise data.max_len"


def load(
    specs: Sequence[str],
    split: str,
    limit: LengthLimit,
    make: Callable[[Row, str], tuple[ItemT, int]],
    *,
    id_key: str | None,
    max_samples: int | None = None,
    only: RowList | None = None,
    prepare: Callable[[Row], Row] | None = None,
) -> tuple[list[ItemT], tuple[Source, ...]]:
    """The items that were kept, dataset after dataset in their own order, and the counts of each dataset.

    Args:
        specs: Datasets, as in ``data.prompt_dataset``.
        split: Split of Hugging Face datasets.
        limit: What is too long, and what becomes of it.
        make: From a row and its dataset's name to an item and its length in tokens.
        id_key: ``data.id_key``, for messages.
        max_samples: Use only the first rows of each dataset.
        only: Use only these rows.
        prepare: Done to each row before ``make``, in threads and a few rows ahead: reading its images.

    Raises:
        DataError: A dataset or a row of it cannot be used, a row id comes twice, a dataset has no row left, or one of
            ``only`` is not there.
    """
    items: list[ItemT] = []
    sources: list[Source] = []
    places: dict[str, str] = {}  # row id -> place
    for spec, name in zip(specs, source_names(specs), strict=True):
        kept, overlong = 0, 0
        rows = read_rows(spec, split) if only is None else _listed(read_rows(spec, split), name, id_key, only)
        wanted = itertools.islice(rows, max_samples)
        for row in wanted if prepare is None else _prepared(wanted, prepare):
            item, length = make(row, name)
            _check_unique(item.row_id, row.place, places, id_key)
            if _fits(length, row.place, limit):
                items.append(item)
                kept += 1
            else:
                overlong += 1
        if only is not None and not kept and not overlong:
            sources.append(Source(name, 0, 0))  # the list is of other datasets
        else:
            sources.append(_source(spec, name, kept, overlong, limit))
    if only is not None:
        only.check_complete(len(items) + sum(source.overlong for source in sources), max_samples)
    return items, tuple(sources)


def _listed(rows: Iterator[Row], name: str, id_key: str | None, only: RowList) -> Iterator[Row]:
    return (row for row in rows if columns.row_id(row, name, id_key) in only)


def _prepared(rows: Iterator[Row], prepare: Callable[[Row], Row]) -> Iterator[Row]:
    """``prepare(row)`` of each, in order; the first error ends it."""
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rows")
    waiting: deque[Future[Row]] = deque()
    try:
        for row in rows:
            waiting.append(pool.submit(prepare, row))
            if len(waiting) >= ROWS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_unique(row_id: str, place: str, places: dict[str, str], id_key: str | None) -> None:
    if row_id in places:
        raise DataError(
            f"{place}: its row id {row_id!r} is that of {places[row_id]} too: make the ids of "
            f"data.id_key={id_key!r} unique, or set it to null to number the rows"
        )
    places[row_id] = place


def _fits(length: int, place: str, limit: LengthLimit) -> bool:
    if length > limit.tokens and limit.overlong == "error":
        raise DataError(
            f"{place}: the {limit.noun} has {length} tokens, and {limit.tokens} ({limit.meaning}) are allowed: "
            f"{limit.remedy}, or set data.overlong=drop"
        )
    return length <= limit.tokens


def _source(spec: str, name: str, kept: int, overlong: int, limit: LengthLimit) -> Source:
    if kept == 0 and overlong == 0:
        raise DataError(f"{spec} has no rows: fill it, or take it out of the list of datasets")
    if kept == 0:
        raise DataError(
            f"{spec}: all {overlong} {limit.noun}s are longer than {limit.tokens} tokens ({limit.meaning}): {limit.remedy}"
        )
    if overlong:
        logger.warning(
            "%s: dropped %d of %d %ss over %d tokens", spec, overlong, kept + overlong, limit.noun, limit.tokens
        )
    return Source(name, kept, overlong)
