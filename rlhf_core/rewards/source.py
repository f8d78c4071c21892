"""The one interface of everything that scores answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import RewardRequest, RewardResult


class RewardSource(Protocol):
    """Scores samples: a function, a server, a trained model, or a sum of them."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """One typed result per request, in the order of the requests.

        A sample that cannot be scored is a result with its status and reason. ``RewardError`` is raised only if the
        source cannot be used at all.
        """
        ...

    async def close(self) -> None:
        """Free everything the source holds. A second call does nothing."""
        ...
