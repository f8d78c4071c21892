"""The tokenizer of a model, and the token ids that end its answers. ``transformers`` is imported at the first call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tokenizer(Protocol):
    """What this package asks of a Hugging Face tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    eos_token: str | None
    is_fast: bool  # True: it knows which characters each token stands for
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, Any]  # id -> token with a flag ``special``
    special_tokens_map: dict[str, Any]

    def __call__(self, text: str, **options: Any) -> Any:
        """Text to token ids and more."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Chat messages to text or token ids."""
        ...

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """The template that ``apply_chat_template`` would use."""
        ...


def load_tokenizer(name: str, *, trust_remote_code: bool = False, use_fast: bool = True) -> Tokenizer:
    """The tokenizer of a model folder or hub id.

    Raises:
        ConfigError: There is none, or it cannot be reached.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, use_fast=use_fast)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {name!r}: {error}; check actor.model_name_or_path") from error
    return cast("Tokenizer", loaded)


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Every token id that stands for no text of its own: those the tokenizer names, and those added as special."""
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return {*tokenizer.all_special_ids, *added}


def end_of_sequence_ids(model_path: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """All token ids that end an answer, ascending: the tokenizer's own and those of ``generation_config.json``.

    Chat models often list two (end of turn, end of text): an answer that ends in either is not truncated. Empty only if
    the model has none.

    Args:
        model_path: A model folder or hub id.
        tokenizer: Its tokenizer.
    """
    listed = _generation_config(model_path).get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({token for token in (*ids, tokenizer.eos_token_id) if token is not None}))


def _generation_config(model_path: str) -> dict[str, Any]:
    path = Path(model_path) / "generation_config.json"
    if not Path(model_path).is_dir():
        from transformers.utils import cached_file

        # None if the repository has no such file; a hub out of reach raises
        found = cached_file(model_path, path.name, _raise_exceptions_for_missing_entries=False)
        if found is None:
            return {}
        path = Path(found)
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
