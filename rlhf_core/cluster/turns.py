"""Whose turn it is on GPUs that all models share (``train.colocate_all``): what must not be there leaves before the rest comes.

::

                  engines    policy        critic, reference    reward model
    to_engines    awake      away          away                 away            rollout, evaluation
    to_scoring    asleep     away          away                 loaded          only in runs that have a reward model
    to_training   asleep     loaded        loaded               away            log-probs, update, checkpoint
    to_sync       asleep     parameters    away                 away            an engine wakes for its new weights by itself

Engines leave with ``vllm.enable_sleep``, the other models with ``ds.enable_sleep``. Nothing is remembered here: every actor is
told where it has to be, and knows whether it is there. So a turn is right after a crash of the controller, after one that broke
off, and after an actor was made again: a new engine is awake, a new rank is loaded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.errors import DeadlineError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from rlhf_core.config import Config

    Actors = Callable[[], Sequence[Any]]  # those of a role as they are now: the dead are made again
    Calls = Callable[[], Iterable[Awaitable[Any]]]

logger = get_logger(__name__)


class Turns:
    """Moves the actors of a run on and off the GPUs. Without either key nothing moves.

    Who calls sees to it that nobody uses what leaves. Engines look by themselves: none sleeps with requests in flight.

    Args:
        config: the run's.
        engines: the engines.
        policy: ranks of the policy.
        beside: ranks of the models that compute beside it: critic and reference.
        reward: processes of the reward model.
    """

    def __init__(self, config: Config, *, engines: Actors, policy: Actors, beside: Actors, reward: Actors) -> None:
        self._engines_sleep, self._models_leave = config.vllm.enable_sleep, config.ds.enable_sleep
        self._seconds = config.run.stage_timeout
        self._engines, self._policy, self._beside, self._reward = engines, policy, beside, reward
        self._moving = asyncio.Lock()

    @property
    def are_taken(self) -> bool:
        """True if anything ever leaves the GPUs."""
        return self._engines_sleep or self._models_leave

    async def to_engines(self) -> None:
        """Engines generate. A dead actor is passed over: it holds no memory, and whoever needs it finds out.

        Raises:
            DeadlineError: an actor did not answer within ``run.stage_timeout``.
            WorkerError: an engine did not wake up.
        """
        await self._turn(
            "the engines",
            lambda: self._offload(self._policy, self._beside, self._reward),
            lambda: [engine.wake_up.remote() for engine in self._sleepers()],
        )

    async def to_scoring(self) -> None:
        """The reward model scores; a no-op in runs without one.

        Raises:
            DeadlineError: as ``to_engines``.
            WorkerError: an engine has requests in flight, or did not fall asleep.
        """
        if self._reward():
            await self._turn(
                "the reward model",
                lambda: [*self._sleep(), *self._offload(self._policy, self._beside)],
                lambda: self._reload(self._reward),
            )

    async def to_training(self) -> None:
        """Policy, critic and reference compute; errors as ``to_scoring``."""
        await self._turn(
            "training",
            lambda: [*self._sleep(), *self._offload(self._reward)],
            lambda: self._reload(self._policy, self._beside),
        )

    async def to_sync(self) -> None:
        """The policy sends its parameters to the engines; errors as ``to_scoring``."""
        await self._turn(
            "the weight sync",
            lambda: [
                *self._sleep(),
                *self._offload(self._beside, self._reward),
                *(rank.offload.remote(keep_parameters=True) for rank in self._leavers(self._policy)),
            ],
            lambda: [rank.reload.remote(parameters_only=True) for rank in self._leavers(self._policy)],
        )

    # --- private ------------------------------------------------------------------------------------------------------

    async def _turn(self, whose: str, leave: Calls, come: Calls) -> None:
        if not self.are_taken:
            return
        async with self._moving:
            for calls in (leave, come):
                try:
                    async with asyncio.timeout(self._seconds):
                        await asyncio.gather(*map(_unless_gone, calls()))
                except TimeoutError as error:
                    raise DeadlineError(
                        f"the turn of {whose} on the GPUs: no answer within {self._seconds:g} s (run.stage_timeout)"
                    ) from error

    def _sleepers(self) -> Sequence[Any]:
        return self._engines() if self._engines_sleep else ()

    def _leavers(self, *roles: Actors) -> list[Any]:
        return [rank for role in roles for rank in role()] if self._models_leave else []

    def _sleep(self) -> list[Awaitable[Any]]:
        return [engine.sleep.remote() for engine in self._sleepers()]

    def _offload(self, *roles: Actors) -> list[Awaitable[Any]]:
        return [rank.offload.remote() for rank in self._leavers(*roles)]

    def _reload(self, *roles: Actors) -> list[Awaitable[Any]]:
        return [rank.reload.remote() for rank in self._leavers(*roles)]


async def _unless_gone(call: Awaitable[Any]) -> None:
    try:
        await call
    except PROCESS_GONE as error:
        logger.info("passed over at a turn: %s", type(error).__name__)
