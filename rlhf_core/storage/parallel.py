"""Several acts at once, in threads."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(act: Callable[[Item], Result], items: Iterable[Item], at_once: int, ahead: int = 0) -> Iterator[Result]:
    """``act`` on each item, in order of the items; the first error stops those not begun.

    Args:
        act: on one item.
        items: taken as there is room for them.
        at_once: how many are under way.
        ahead: results that may wait for whoever asks for them, which bounds the memory; default: ``at_once``.
    """
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="storage")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(act, item))
            if len(waiting) >= (ahead or at_once):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
