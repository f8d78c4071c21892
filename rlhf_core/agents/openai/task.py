"""What an agent is told about its episode, and what can run one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.errors import AgentError

if TYPE_CHECKING:
    from rlhf_core.agents.episode import Episode
    from rlhf_core.agents.openai.answer import AgentAnswer
    from rlhf_core.records import Prompt, Session


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One episode, as its agent sees it."""

    session: Session
    prompt: str  # what the user says, not rendered by the chat template
    label: Any  # any JSON value
    messages: list[dict[str, Any]]  # the prompt as chat messages
    seed: int | None

    @classmethod
    def of(cls, episode: Episode, session: Session) -> AgentTask:
        """The task of an episode whose session is open.

        Raises:
            AgentError: the prompt shows images, which no agent is given yet.
        """
        if episode.prompt.images:
            raise AgentError(
                f"prompt {episode.prompt.row_id} shows images, which agents with an OpenAI client are not given: let the agent "
                "send them in its own calls, or play the prompt with another agent"
            )
        prompt, messages = said_by_the_user(episode.prompt)
        return cls(session, prompt, episode.prompt.label, messages, episode.sampling.seed)

    def document(self) -> dict[str, Any]:
        """The task as JSON, for agents in other processes."""
        return {
            "session_id": self.session.session_id,
            "base_url": self.session.base_url,
            "api_key": self.session.api_key,
            "prompt": self.prompt,
            "label": self.label,
            "messages": self.messages,
            "seed": self.seed,
        }


class AgentRunner(Protocol):
    """A way to run agents. Belongs to one event loop and never blocks it."""

    async def run(self, task: AgentTask, seconds: float) -> AgentAnswer:
        """Run the agent on one episode, at most so many seconds; cancelled, it leaves nothing behind.

        Raises:
            AgentError: the agent failed.
            AgentDeadlineError: it did not end in time, and was ended.
        """
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


def said_by_the_user(prompt: Prompt) -> tuple[str, list[dict[str, Any]]]:
    """The prompt as plain text and as chat messages: the text of the last user turn, where there are messages."""
    if prompt.messages is None:
        return prompt.text, [{"role": "user", "content": prompt.text}]
    messages = [dict(message) for message in prompt.messages]
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    return (_text(said[-1]) if said else prompt.text), messages


def _text(content: Any) -> str:
    """The text of a message whose content may be a list of parts."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
