"""One tokenisation of one text, and which of its tokens stand for which of its characters.

    text     Q:  4  2  <|im_end|>
    token    0   1  2  3             token_at(character of "4") == 1

The text is tokenised once, whole. Spans are found in it as characters and looked up here: tokenising the pieces would
give other ids wherever a token crosses a boundary. Such a token belongs to the side it *begins* on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlhf_core.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Tokenised:
    """A text as token ids that can be looked up by character."""

    text: str
    token_ids: list[int]  # [T]
    begins: NDArray[np.int64] | None  # [T] the character at which each token begins; None: the tokenizer cannot say
    tokenizer: Tokenizer

    def token_at(self, character: int, place: str) -> int:
        """The first token that begins at ``character`` or behind it; T at the end of the text.

        A slow tokenizer is asked for the tokens before ``character`` instead, which must open the whole text's.

        Raises:
            DataError: The tokenizer is slow, and a token crosses ``character``.
        """
        if self.begins is not None:
            return int(np.searchsorted(self.begins, character))
        if character == len(self.text):
            return len(self.token_ids)
        before = self.tokenizer.encode(self.text[:character], add_special_tokens=False)
        if self.token_ids[: len(before)] != before:
            raise DataError(
                f"{place}: the slow tokenizer cannot tell which tokens begin at character {character}, "
                f"{self.text[character : character + 20]!r}: set data.disable_fast_tokenizer=false, or begin the answer "
                "with a line break"
            )
        return len(before)


def tokenise(text: str, tokenizer: Tokenizer) -> Tokenised:
    """Tokenise ``text`` as it is: no BOS or EOS is added."""
    if not tokenizer.is_fast:
        return Tokenised(text, list(tokenizer.encode(text, add_special_tokens=False)), None, tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Tokenised(text, list(encoded["input_ids"]), _begins(encoded["offset_mapping"]), tokenizer)


def _begins(offsets: list[tuple[int, int]]) -> NDArray[np.int64]:
    """``[T]`` where each token really begins.

    Some tokenizers (Llama 3's) trim white space off their offsets: a token " hi" claims to begin at "h". Tokens leave
    no gap, so it begins where the one before it ended. The bytes of one character all have the offsets of the character.
    """
    starts_ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    end_before = np.maximum.accumulate(np.append(0, starts_ends[:, 1]))[:-1]
    begins: NDArray[np.int64] = np.minimum(starts_ends[:, 0], end_before)
    return begins
