"""The examples of a supervised run: from ``data.dataset`` (or ``eval.dataset``) to token ids, once, at the start.

    specs ──▶ rows ──▶ checked, tokenised (conversations.py), overlong dropped ──▶ SupervisedDataset[index] ──▶ example

Kept are token ids (4 bytes a token) and text; nothing is tokenised while the run trains.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from rlhf_core.data.conversations import PreferenceExample, SftExample, preference_example, sft_example
from rlhf_core.data.loading import LengthLimit, Source, load
from rlhf_core.data.order import PromptOrder
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.config.supervised import Method, SupervisedConfig
    from rlhf_core.data.tokenizer import Tokenizer
    from rlhf_core.data.transcripts import Transcript
    from rlhf_core.data.values import Row

ExampleT = TypeVar("ExampleT", bound=SftExample | PreferenceExample)
OnPairs = Literal["reward_model", "dpo"]


class SupervisedDataset(Generic[ExampleT]):
    """Examples of one or several datasets, laid end to end in their own order."""

    def __init__(self, examples: Sequence[ExampleT], sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._examples: tuple[ExampleT, ...] = tuple(examples)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> ExampleT:
        return self._examples[index]

    def __iter__(self) -> Iterator[ExampleT]:
        return iter(self._examples)

    @property
    def overlong(self) -> int:
        """Rows dropped because they are longer than ``data.max_len``."""
        return sum(source.overlong for source in self.sources)

    def fingerprint(self) -> str:
        """sha256, hex, over every example in its order: two runs with the same one train on the same tokens."""
        sha256 = hashlib.sha256()
        for example in self._examples:
            parts, margin = _parts(example)
            ranges = [part.action_ranges for part in parts]
            sha256.update(json.dumps([example.row_id, example.datasource, margin, ranges]).encode() + b"\n")
            for part in parts:
                sha256.update(part.token_ids.astype("<i4").tobytes())
        return sha256.hexdigest()

    def order(self, seed: int, probs: Sequence[float] | None = None) -> PromptOrder:
        """The seeded order in which these examples are drawn, mixed by ``probs`` (one weight per dataset) if given."""
        return PromptOrder([source.size for source in self.sources], seed, probs)


@overload
def supervised_examples(
    config: SupervisedConfig, method: Literal["sft"], tokenizer: Tokenizer
) -> SupervisedDataset[SftExample]: ...


@overload
def supervised_examples(
    config: SupervisedConfig, method: OnPairs, tokenizer: Tokenizer
) -> SupervisedDataset[PreferenceExample]: ...


def supervised_examples(config: SupervisedConfig, method: Method, tokenizer: Tokenizer) -> SupervisedDataset[Any]:
    """The examples of ``data.dataset``; their order is ``.order(train.seed, data.probs)``.

    Args:
        config: Of the run.
        method: ``sft`` gives ``SftExample``, ``reward_model`` and ``dpo`` give ``PreferenceExample``.
        tokenizer: Of the model that is trained.

    Raises:
        DataError: A dataset or a row of it cannot be used, a row id comes twice, or a dataset has no row left.
        ConfigError: ``train.max_tokens_per_gpu`` cannot hold a pair.
    """
    data = config.data
    return _load(config, method, tokenizer, data.dataset, data.split, data.max_samples)


@overload
def held_out_examples(
    config: SupervisedConfig, method: Literal["sft"], tokenizer: Tokenizer
) -> SupervisedDataset[SftExample] | None: ...


@overload
def held_out_examples(
    config: SupervisedConfig, method: OnPairs, tokenizer: Tokenizer
) -> SupervisedDataset[PreferenceExample] | None: ...


def held_out_examples(config: SupervisedConfig, method: Method, tokenizer: Tokenizer) -> SupervisedDataset[Any] | None:
    """The examples of ``eval.dataset``, with the columns and templates of ``data``; None if there is none."""
    held_out = config.eval
    if not held_out.dataset:
        return None
    return _load(config, method, tokenizer, held_out.dataset, held_out.split, held_out.max_samples)


def _parts(example: SftExample | PreferenceExample) -> tuple[tuple[Transcript, ...], float]:
    """(transcripts, margin)."""
    if isinstance(example, SftExample):
        return (example,), 0.0
    return (example.chosen, example.rejected), example.margin


def _load(
    config: SupervisedConfig,
    method: Method,
    tokenizer: Tokenizer,
    specs: Sequence[str],
    split: str,
    max_samples: int | None,
) -> SupervisedDataset[Any]:
    data = config.data
    limit = LengthLimit(
        tokens=data.max_len,
        overlong=data.overlong,
        noun="example",
        meaning="data.max_len",
        remedy="raise data.max_len",
    )
    read = functools.partial(load, specs, split, limit, id_key=data.id_key, max_samples=max_samples)
    if method == "sft":

        def make(row: Row, source: str) -> tuple[SftExample, int]:
            example = sft_example(row, source, data, tokenizer, train_on_prompt=config.sft.train_on_prompt)
            return example, len(example.token_ids)

        return SupervisedDataset(*read(make))

    def make_pair(row: Row, source: str) -> tuple[PreferenceExample, int]:
        pair = preference_example(row, source, data, tokenizer)
        return pair, max(len(pair.chosen.token_ids), len(pair.rejected.token_ids))

    _check_budget(config)
    return SupervisedDataset(*read(make_pair))


def _check_budget(config: SupervisedConfig) -> None:
    """Both answers of a pair are in one micro-batch."""
    budget, longest = config.train.max_tokens_per_gpu, config.data.max_len
    together = config.ds.ranks_per_row
    if config.train.dynamic_batch_enable and together * budget < 2 * longest:
        raise ConfigError(
            f"train.max_tokens_per_gpu={budget} cannot hold a pair of answers of data.max_len={longest} tokens each: "
            f"raise it to {-(-2 * longest // together)}"
        )
