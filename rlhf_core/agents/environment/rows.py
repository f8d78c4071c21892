"""Plays the environment of a row: what ``env:`` datasets are played with.

::

    label of the row ──reset──▶ the environment again ◀──step── what the policy said
                                      └──▶ reward of the step, feedback, a picture

``score`` is 1 once the task is solved, else 0, whatever the rewards of the environment are; so ``eval/pass@1`` and the filter
of groups mean the same everywhere. With chat messages the feedback is a user's message, else it is text on lines of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.base import AgentInstanceBase
from rlhf_core.environments.opening import opened
from rlhf_core.environments.registry import prepare
from rlhf_core.environments.spec import EpisodeSpec, digest_of, is_environment, parse_environment
from rlhf_core.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import Config
    from rlhf_core.environments.base import Scene, TextEnvironment


class EnvironmentAgent(AgentInstanceBase):
    """One environment, for one episode."""

    def __init__(self, collections: Sequence[str] = ()) -> None:
        """``collections``: of the run; what they import is there once the first agent has been made."""
        self._environment: TextEnvironment | None = None
        self._chats = False
        self._invalid = 0.0

    def reset(self, states: dict[str, Any]) -> None:
        """The prompt is the first observation, as it was when the rows were made.

        Raises:
            AgentError: the environment shows something else now.
        """
        episode = EpisodeSpec.from_label(states["label"])
        self._environment, scene = opened(episode)
        self._chats = states.get("messages") is not None
        if digest_of(scene.text) != states["label"]["observation_sha256"]:
            raise AgentError(
                f"{episode.environment} with seed {episode.seed} begins otherwise than when its prompt was made: it does not "
                f"depend on its seed alone, or another version of its package is installed here; it shows {scene.text[:80]!r}"
            )

    def step(self, states: dict[str, Any]) -> dict[str, Any]:
        """One action."""
        if self._environment is None:
            raise AgentError("step without reset")
        reaction = self._environment.step(states["action_text"])
        self._invalid += reaction.info.get("invalid", 0.0)
        answer: dict[str, Any] = {
            "rewards": reaction.reward,
            "scores": float(self._environment.solved),
            "done": reaction.done,
            "extra_logs": {"success": float(self._environment.solved), "invalid_actions": self._invalid},
        }
        if not reaction.done:
            answer |= self._told(reaction.scene)
        return answer

    def close(self) -> None:
        """Let go of the environment."""
        if self._environment is not None:
            self._environment.close()

    def _told(self, scene: Scene) -> dict[str, Any]:
        if scene.image is None:
            text = scene.text
            return {"environment_feedback": {"role": "user", "content": text} if self._chats else f"\n{text}\n"}
        if not self._chats:
            raise AgentError(
                "pictures of an environment need data.apply_chat_template=true: it says where they go in the text"
            )
        content = [{"type": "image"}, {"type": "text", "text": scene.text}]
        return {
            "environment_feedback": {"role": "user", "content": content},
            "environment_images": [scene.image],
        }


def environment_argument(config: Config) -> dict[str, Any]:
    """Arguments of ``EnvironmentAgent``, for the rows of a run: JSON."""
    specs = [spec for spec in (*config.data.prompt_dataset, *config.eval.dataset) if is_environment(spec)]
    return {"collections": sorted({parse_environment(spec).collection for spec in specs})}


def prepare_environments(argument: dict[str, Any]) -> None:
    """Import what the environments need: in the process that is forked for each episode.

    Raises:
        ConfigError: a package is not installed.
    """
    prepare(argument["collections"])
