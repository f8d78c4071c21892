"""Where a run is, for its log lines: set around the work, found by whatever logs within it.

::

    @in_stage("update")
    async def update(run_id, iteration): …      every line below: run_id=…, stage=update, iteration=…

A context variable: what runs at the same time, in other tasks of the loop or in threads made by ``asyncio.to_thread``, has
its own.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of it; None: not said."""

    run_id: str | None = None
    stage: str | None = None
    iteration: int | None = None
    policy_version: int | None = None


NOWHERE = Place()

_HERE: ContextVar[Place] = ContextVar("place", default=NOWHERE)


def here() -> Place:
    """Where this code is called from."""
    return _HERE.get()


@contextmanager
def at(**known: Any) -> Iterator[None]:
    """Within, these fields of the place are these."""
    before = _HERE.get()
    _HERE.set(replace(before, **known))
    try:
        yield
    finally:
        _HERE.set(before)


def in_stage(stage: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Around a function, or a coroutine function, that does the work of a stage.

    Iteration, version and run are found among its arguments: ``iteration``, ``version`` and ``run_id``, or the ``iteration``
    of an argument that has one (a draw, a reference to another stage).
    """

    def around(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(work)

        def place(*args: Any, **kwargs: Any) -> dict[str, Any]:
            given = signature.bind(*args, **kwargs).arguments
            found: dict[str, Any] = {"stage": stage}
            iterations = [given.get("iteration"), *(getattr(value, "iteration", None) for value in given.values())]
            for name, values in (
                ("iteration", iterations),
                ("policy_version", [given.get("version")]),
                ("run_id", [given.get("run_id")]),
            ):
                known = next((value for value in values if value is not None), None)
                if known is not None:
                    found[name] = known
            return found

        if inspect.iscoroutinefunction(work):

            @wraps(work)
            async def awaited(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
                with at(**place(*args, **kwargs)):
                    return await work(*args, **kwargs)

            return cast("Callable[Arguments, Result]", awaited)

        @wraps(work)
        def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with at(**place(*args, **kwargs)):
                return work(*args, **kwargs)

        return called

    return around
