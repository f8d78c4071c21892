"""The nouns that travel between the stages. Pure data: numpy at most."""

from rlhf_core.records.episodes import EpisodeRows, episodes_of
from rlhf_core.records.experience import Experience
from rlhf_core.records.generation import Generate, GenerateRequest, Generation, SamplingParams
from rlhf_core.records.prompt import Prompt, PromptCursor
from rlhf_core.records.reward import RewardRequest, RewardResult, RewardStatus
from rlhf_core.records.rounds import Draw, KeptGroup, OpenGroup, Round
from rlhf_core.records.session import AgentServer, CallRecord, Session, SessionRecord, SessionRequest
from rlhf_core.records.stage import Ledger, Part, Stage, StageManifest, StageRef
from rlhf_core.records.trajectory import (
    ActionRange,
    ImageRef,
    StepReward,
    StopReason,
    Trajectory,
    VersionSpan,
    action_mask,
    oldest_version_of,
)

__all__ = [
    "ActionRange",
    "AgentServer",
    "CallRecord",
    "Draw",
    "EpisodeRows",
    "Experience",
    "Generate",
    "GenerateRequest",
    "Generation",
    "ImageRef",
    "KeptGroup",
    "Ledger",
    "OpenGroup",
    "Part",
    "Prompt",
    "PromptCursor",
    "RewardRequest",
    "RewardResult",
    "RewardStatus",
    "Round",
    "SamplingParams",
    "Session",
    "SessionRecord",
    "SessionRequest",
    "Stage",
    "StageManifest",
    "StageRef",
    "StepReward",
    "StopReason",
    "Trajectory",
    "VersionSpan",
    "action_mask",
    "episodes_of",
    "oldest_version_of",
]
