"""The execution axis: how a prompt becomes trajectories. Executors speak only to something that generates."""

from rlhf_core.agents.environment.base import AgentInstanceBase
from rlhf_core.agents.episode import Episode, Tokenizer, TurnLimits, run_episode, run_group
from rlhf_core.agents.executor import AgentExecutorBase
from rlhf_core.agents.multi_turn.executor import MultiTurnAgentExecutor
from rlhf_core.agents.publishing import GroupPublisher
from rlhf_core.agents.rollout import FailureWatch, GroupsInPlay, play
from rlhf_core.agents.single_turn import SingleTurnAgentExecutor

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "Episode",
    "FailureWatch",
    "GroupPublisher",
    "GroupsInPlay",
    "MultiTurnAgentExecutor",
    "SingleTurnAgentExecutor",
    "Tokenizer",
    "TurnLimits",
    "play",
    "run_episode",
    "run_group",
]
