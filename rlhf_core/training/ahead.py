"""Work that does not wait for the model: the next batch is made while the model computes on this one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """``make(item)`` of each item, in order, always one of them in advance in a thread of its own.

    Nothing is made before the first is asked for. An error of ``make`` is raised where its result is asked for.
    """
    waiting: Future[Made] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        for item in items:
            following = pool.submit(make, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
