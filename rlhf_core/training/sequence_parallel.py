"""One packed row over several ranks (``ds.sequence_parallel_size``): each has a part of the tokens, or of the heads.

::

    rank 0   tokens 0 … n-1    ─┐ all-to-all ┌─ all tokens, heads 0 … h-1   ─ attention ─┐ all-to-all ┌─ tokens 0 … n-1
    rank 1   tokens n … 2n-1   ─┴────────────┴─ all tokens, heads h … 2h-1  ─ attention ─┴────────────┴─ tokens n … 2n-1

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). All that is not attention looks at one token at a time, and so sees
its own part only. Attention sees all tokens, and the bounds of the samples among them, for its share of the heads; it is
whichever function of Transformers the model was loaded with. DeepSpeed's own form of it (``UlyssesSPAttentionHF``) knows
nothing of samples that share a row.

What is made of the hidden states is put together again on each of the ranks (``Asked``), so that all of them compute the same
loss. Each hands back the gradient of its own tokens; the sum over all ranks, which DeepSpeed takes anyway, is the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core.training.ranks import RankInfo


@dataclass(frozen=True, slots=True)
class SequenceSplit:
    """The ranks among which the tokens of a row are divided, and which of them this is."""

    size: int = 1  # P, of the ranks
    index: int = 0
    group: Any = None

    def padding(self, tokens: int) -> int:
        """Tokens that are missing to equal parts."""
        return -tokens % self.size

    def mine(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a dimension of P equal ones: a view."""
        length = whole.shape[dim] // self.size
        return whole.narrow(dim, self.index * length, length)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """``[n, …]`` of each rank, n equal, to ``[P n, …]`` on all. What is made of it must be the same on all of them."""
        return part if self.size == 1 else _Join.apply(part, self)

    def to_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[1, h P, n, D]``: all heads of this rank's tokens, to ``[1, h, n P, D]``: all tokens of its heads."""
        _, heads, length, width = tokens.shape
        sent = tokens.view(self.size, heads // self.size, length, width)
        received = _Exchange.apply(sent, self)  # [P, h, n, D], by the rank whose tokens they are
        return received.transpose(0, 1).reshape(1, heads // self.size, length * self.size, width)

    def to_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """``[1, n P, h, D]`` to ``[1, n, h P, D]``: back, in the layout of what an attention function answers."""
        _, length, held, width = heads.shape
        sent = heads.view(self.size, length // self.size, held, width)
        received = _Exchange.apply(sent, self)  # [P, n, h, D], by the rank whose heads they are
        return received.transpose(0, 1).reshape(1, length // self.size, held * self.size, width)


WHOLE = SequenceSplit()


def sequence_split(rank: RankInfo) -> SequenceSplit:
    """Among ``rank.sequence_parallel_size`` neighbours. A collective of all ranks."""
    size = rank.sequence_parallel_size
    if size == 1:
        return WHOLE
    return SequenceSplit(size, rank.rank % size, _group(rank.rank, rank.world_size, size))


@cache  # a process group is never given back
def _group(rank: int, world_size: int, size: int) -> Any:
    groups = [distributed.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    return groups[rank // size]


@dataclass(frozen=True, slots=True)
class Asked:
    """The tokens of a packed row whose hidden states are looked at, and which of them lie on this rank.

    ``N``: all of them, in the order of the row; ``M``: those here. A rank that has none looks at its first token, and what it
    says of it is dropped: every rank has the same passes, forward and backward, through whatever comes after the backbone.
    """

    split: SequenceSplit
    places_N: torch.Tensor  # in the row
    places_M: torch.Tensor  # in this rank's part of it
    chosen_M: torch.Tensor  # index among all of them
    length: int  # of this rank's part, tokens

    @classmethod
    def of(cls, places_N: torch.Tensor, hidden_1TH: torch.Tensor, split: SequenceSplit) -> Asked:
        """``places_N``: ascending; ``hidden_1TH``: of this rank's tokens."""
        length = hidden_1TH.shape[1]
        start = split.index * length
        chosen_M = ((places_N >= start) & (places_N < start + length)).nonzero()[:, 0]
        places_M = places_N[chosen_M] - start
        if len(places_N) and not len(chosen_M):
            chosen_M, places_M = places_N.new_zeros(1), places_N.new_zeros(1)
        return cls(split, places_N, places_M, chosen_M, length)

    def hidden(self, hidden_1TH: torch.Tensor) -> torch.Tensor:
        """``[M, H]``."""
        return hidden_1TH[0, self.places_M]

    def here(self, values_N: torch.Tensor) -> torch.Tensor:
        """``[M]``."""
        return values_N[self.chosen_M]

    def everywhere(self, values_M: torch.Tensor) -> torch.Tensor:
        """``[N]``, the same on every rank."""
        if self.split.size == 1:
            return values_M
        part = values_M.new_zeros(self.length).index_copy(0, self.places_M, values_M)
        return self.split.join(part)[self.places_N]


def over_heads(attention: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function of Transformers that computes its share of the heads where the backbone was given a split."""

    @wraps(attention)
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        sequence_split: SequenceSplit | None = None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        if sequence_split is None:
            whole: tuple[torch.Tensor, None] = attention(module, query, key, value, attention_mask, **settings)
            return whole
        _check(module, sequence_split, query, key, attention_mask, settings.get("s_aux"))
        settings.pop("position_ids", None)  # of this rank's tokens; nobody needs those of all beside the bounds
        heads = (sequence_split.to_heads(part.contiguous()) for part in (query, key, value))
        attended, _ = attention(module, *heads, None, **settings)
        return sequence_split.to_tokens(attended.contiguous()), None

    return attend


def _check(
    module: torch.nn.Module,
    split: SequenceSplit,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    name, set_key = type(module).__name__, f"ds.sequence_parallel_size={split.size}"
    for heads, noun in ((query.shape[1], "heads"), (key.shape[1], "key-value heads")):
        if heads % split.size:
            raise TrainingError(f"{set_key} does not divide the {heads} {noun} of {name}: use a divisor of them")
    if attention_mask is not None or sinks is not None:
        what = "a mask" if sinks is None else "attention sinks"
        raise TrainingError(f"{set_key}: {name} has {what}, which is not divided over ranks: set it to 1")


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """``[P, …]``: row i goes to rank i, whose row it replaces with the one it gets from there."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, split: SequenceSplit) -> torch.Tensor:
        ctx.split = split
        return _exchange(sent, split)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(gradient, ctx.split), None


def _exchange(sent: torch.Tensor, split: SequenceSplit) -> torch.Tensor:
    received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
    distributed.all_to_all_single(received, sent.contiguous(), group=split.group)
    return received


class _Join(torch.autograd.Function):  # type: ignore[misc]
    """See ``SequenceSplit.join``: the gradient of each part is what every rank computes for it, not their sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, split: SequenceSplit) -> torch.Tensor:
        ctx.split = split
        whole = part.new_empty((split.size * part.shape[0], *part.shape[1:]))
        distributed.all_gather_single(whole, part.contiguous(), group=split.group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.split.mine(gradient, 0).contiguous(), None
