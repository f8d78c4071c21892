"""The text of what a policy said, to be trained on as text.

The answer's tokens are decoded whole, without the special tokens that end them: training puts its own end there
(``transcripts``). Text does not always become the tokens it came from: a policy may say "a" "b" where the tokenizer says "ab".
So it is counted how many texts do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.data.templates import missing_bos
from rlhf_core.data.tokenizer import special_ids

if TYPE_CHECKING:
    from rlhf_core.data.tokenizer import Tokenizer
    from rlhf_core.records import Trajectory


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as text."""

    text: str
    same_tokens: bool  # tokenising prompt and answer gives the tokens that were sampled


class Speech:
    """Decodes answers with the tokenizer of their policy."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)

    def answers_prompt(self, row: Trajectory) -> bool:
        """True if the policy saw the prompt that the row names: an agent with an OpenAI client may have asked it otherwise."""
        seen = row.token_ids[: row.action_ranges[0].start].tolist()
        prompt = list(self._tokenizer.encode(row.prompt, add_special_tokens=False))
        if seen in (prompt, [*missing_bos(prompt, self._tokenizer), *prompt]):
            return True
        bare = seen[1:] if seen[:1] == [self._tokenizer.bos_token_id] else seen
        return row.prompt in (self._tokenizer.decode(seen), self._tokenizer.decode(bare))

    def text_of(self, row: Trajectory) -> Said:
        """The answer of a row with one action range."""
        ((start, end),) = row.action_ranges
        ids = [int(token) for token in row.token_ids]
        while end > start and ids[end - 1] in self._special:
            end -= 1
        text = self._tokenizer.decode(ids[start:end])
        again = list(self._tokenizer.encode(row.prompt + text, add_special_tokens=False))
        same = ids[:end] in (again, [*missing_bos(again, self._tokenizer), *again])
        return Said(text, same)
