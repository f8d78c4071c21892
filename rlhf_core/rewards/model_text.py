"""What a trained reward model reads of a sample, as token ids.

::

    its tokenizer is the policy's ──▶ the ids as they were sampled; never tokenised again
    it has its own ──▶ chat messages and a chat template? ──▶ template(messages + answer)
                       else                                ──▶ BOS + tokenise(prompt + answer) + EOS

The last token is the one the score is read at. So the ids end with what ends an answer, as in the training of reward
models (``data.transcripts``): white space that a template writes behind it is left out, and an answer that was cut off
is read as if it had ended there. Sampled ids are taken as they are, without an end where the policy said none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import RewardRequest


class RewardTokenizer(Protocol):
    """What is asked of a Hugging Face tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, Any]  # id -> token with a flag ``special``
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Chat messages to token ids."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Token to id."""
        ...


class UnreadableError(ValueError):
    """A sample that the model cannot read; the message says why."""


def reads_tokens_of(reward: RewardTokenizer, policy: RewardTokenizer, policy_template: Any) -> bool:
    """True if the policy's token ids mean the same to the reward model.

    Args:
        reward: its tokenizer. It may know more tokens: reward models are often given one for padding.
        policy: the policy's tokenizer.
        policy_template: the chat template that prompts are rendered with; None if they are plain text.
    """
    return (
        (reward.bos_token_id, reward.eos_token_id) == (policy.bos_token_id, policy.eos_token_id)
        and (policy_template is None or reward.chat_template == policy_template)
        and policy.get_vocab().items() <= reward.get_vocab().items()
    )


@dataclass(frozen=True, slots=True)
class TokenReader:
    """From samples to the token ids that a reward model reads."""

    tokenizer: RewardTokenizer
    max_len: int  # tokens
    takes_ids: bool = False  # the answer of ``reads_tokens_of``
    limit_name: str = "reward.model_max_len"  # the setting of ``max_len``, for messages

    def read(self, request: RewardRequest) -> Sequence[int]:
        """``[T]``. ``UnreadableError`` if there is nothing to read, or it is too long: it is never cut."""
        if self.takes_ids and request.token_ids is not None:
            return self._checked(request.token_ids.tolist())
        if request.messages is not None and self.tokenizer.chat_template is not None:
            return self._checked(self._chat_ids([*request.messages, {"role": "assistant", "content": request.answer}]))
        return self.read_text(request.query)

    def read_text(self, text: str) -> Sequence[int]:
        """``[T]`` of a whole text, prompt and answer; special tokens in it are read as such."""
        try:
            text.encode()  # a tokenizer's own message says nothing of lone surrogates
            ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        except (TypeError, ValueError) as error:
            raise UnreadableError(f"the reward model's tokenizer cannot read the text: {error}") from error
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:1] != [bos] and self.tokenizer.encode("a")[:1] == [bos]:
            ids.insert(0, bos)
        if eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return self._checked(ids)

    def _chat_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            ids = list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
        except (TemplateError, TypeError, ValueError) as error:
            raise UnreadableError(f"the reward model's chat template refuses the messages: {error}") from error
        return self._without_tail(ids)

    def _without_tail(self, ids: list[int]) -> list[int]:
        """The ids up to the last special token, if only white space follows it."""
        added = (token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        special = {*self.tokenizer.all_special_ids, *added}
        end = len(ids)
        while end and ids[end - 1] not in special:
            if self.tokenizer.decode([ids[end - 1]]).strip():
                return ids
            end -= 1
        return ids[:end] or ids

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise UnreadableError("the sample has no tokens")
        if len(ids) > self.max_len:
            raise UnreadableError(
                f"the sample has {len(ids)} tokens, more than {self.limit_name}={self.max_len}: raise it, or sample shorter "
                "answers"
            )
        return ids
