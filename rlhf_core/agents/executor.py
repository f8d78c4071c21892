"""What every executor is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.agents.episode import Episode
    from rlhf_core.records import Trajectory


class AgentExecutorBase(ABC):
    """Turns an episode into trajectories, token in, token out.

    One executor serves many episodes at a time on one event loop: it keeps no state between them.

    A subclass in a user's file is in OpenRLHF's style: its ``__init__`` hands an ``AgentInstance`` class up, and its
    ``execute``, if there is one, has other parameters. It is never given an episode: ``openrlhf.process`` makes it work.
    """

    @abstractmethod
    async def execute(self, episode: Episode) -> list[Trajectory]:
        """Play one episode.

        Returns:
            Its segments: one row, or several where the token prefix of a conversation broke. They share one reward.

        Raises:
            GenerationError: an engine failed the request; the sample is recorded as failed.
            AgentError: the user's agent or environment failed; the sample is recorded as failed.
        """
