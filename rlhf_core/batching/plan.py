"""Which rank computes which rows, in which micro-batches: a pure function of the lengths.

::

    episodes ──shuffle──▶ optimizer steps ──balance by tokens──▶ ranks ──sort by length, cut──▶ micro-batches
              (seeded per epoch)   └ all rows of its episodes                              (equally many on every rank)

``plan_update`` does all of it; ``plan_step`` and ``plan_pairs`` plan one step whose rows the caller has drawn.

Padded micro-batches are of similar lengths. Packed ones (``ds.packing_samples``) have no padding, so any rows go together: they
are filled up to the token budget, or dealt out so that all are about equally long.

With sequence parallelism a rank is, here, the group of processes that compute the same rows.

Every rank computes the whole plan by itself and takes its own part: nothing is sent. Each rank has equally many
micro-batches, because each forward pass is a collective under ZeRO-3 and a rank without work would leave the others
waiting: a rank that has fewer cuts the ones it has, and at the last repeats a row as a ``filler`` that counts for
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass of one rank."""

    rows: tuple[int, ...]  # indices into the lengths the plan was made from, longest first
    filler: bool = False  # True: computed to keep step with the other ranks; its result counts for nothing


RankPlans = tuple[tuple[MicroBatch, ...], ...]  # [rank][k], equally many k on every rank


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step: the rows of all ranks, and what their losses are divided by."""

    epoch: int
    micro_batches: RankPlans
    num_tokens: int  # action tokens of the step over all ranks
    num_sequences: int  # episodes (rows of ``plan_step``, pairs of ``plan_pairs``) of the step over all ranks
    # row -> action tokens of its whole episode, for rows that are segments: a mean over an episode needs all of its tokens
    episode_tokens: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the step over all ranks."""
        return sum(len(batch.rows) for of_rank in self.micro_batches for batch in of_rank if not batch.filler)


def plan_forward(
    lengths: Sequence[int],
    world_size: int,
    micro_batch_size: int,
    token_budget: int | None = None,
    packed: bool = False,
) -> RankPlans:
    """A plan that visits every row once.

    Args:
        lengths: tokens of each row.
        world_size: ranks to spread the rows over.
        micro_batch_size: rows per micro-batch; without effect if there is a ``token_budget``.
        token_budget: tokens per micro-batch, padding counted.
        packed: a micro-batch has no padding.

    Raises:
        TrainingError: a row is longer than ``token_budget``.
    """
    return _plan_rows(range(len(lengths)), lengths, world_size, _Cut(micro_batch_size, token_budget, packed))


def plan_step(
    rows: Sequence[int],
    lengths: Sequence[int],
    num_actions: Sequence[int],
    *,
    world_size: int,
    micro_batch_size: int,
    token_budget: int | None = None,
    packed: bool = False,
    epoch: int = 0,
) -> OptimizerStep:
    """One optimizer step on the given rows.

    Args:
        rows: indices into ``lengths`` and ``num_actions``, each at most once.
        lengths: tokens of each row.
        num_actions: action tokens of each row.
        world_size: ranks to spread the step over.
        micro_batch_size: rows per micro-batch; without effect if there is a ``token_budget``.
        token_budget: tokens per micro-batch, padding counted.
        packed: a micro-batch has no padding.
        epoch: which pass through the rows the step belongs to.

    Raises:
        TrainingError: a row is longer than ``token_budget``.
    """
    return OptimizerStep(
        epoch=epoch,
        micro_batches=_plan_rows(rows, lengths, world_size, _Cut(micro_batch_size, token_budget, packed)),
        num_tokens=sum(int(num_actions[row]) for row in rows),
        num_sequences=len(rows),
    )


def plan_pairs(
    pairs: Sequence[int],
    lengths: Sequence[tuple[int, int]],
    num_actions: Sequence[tuple[int, int]],
    *,
    world_size: int,
    micro_batch_size: int,
    token_budget: int | None = None,
    packed: bool = False,
) -> OptimizerStep:
    """One optimizer step on the given pairs of rows: both rows of a pair are in the same micro-batch.

    The micro-batches hold indices of pairs; a pair costs twice the longer of its rows, to which both are padded, or, packed,
    the tokens of both.

    Args:
        pairs: indices into ``lengths`` and ``num_actions``, each at most once.
        lengths: tokens of both rows of each pair.
        num_actions: action tokens of both rows of each pair.
        world_size: ranks to spread the step over.
        micro_batch_size: pairs per micro-batch; without effect if there is a ``token_budget``.
        token_budget: tokens per micro-batch, both rows and padding counted.
        packed: a micro-batch has no padding.

    Raises:
        TrainingError: a pair is longer than ``token_budget``.
    """
    costs = [sum(pair) if packed else 2 * max(pair) for pair in lengths]
    if pairs:
        _check_budget(max(pairs, key=lambda pair: costs[pair]), costs, token_budget, noun="pair")
    return plan_step(
        pairs,
        costs,
        [sum(pair) for pair in num_actions],
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        token_budget=token_budget,
        packed=packed,
    )


def plan_update(
    lengths: Sequence[int],
    num_actions: Sequence[int],
    *,
    world_size: int,
    samples_per_step: int,
    max_epochs: int,
    seed: int,
    iteration: int,
    micro_batch_size: int,
    token_budget: int | None = None,
    packed: bool = False,
    episodes: Sequence[Hashable] | None = None,
) -> list[OptimizerStep]:
    """The optimizer steps of one iteration; rows without action tokens are in none of them.

    A step is made of episodes: the segments of one are in the same step, and count as one sample. A short batch (failed
    samples) is spread evenly over ``ceil(episodes / samples_per_step)`` steps, so that no step is much noisier than the others.

    Args:
        lengths: tokens of each row.
        num_actions: action tokens of each row.
        world_size: ranks to spread each step over.
        samples_per_step: episodes of a full step, over all ranks.
        max_epochs: how often every row is trained on.
        seed: with ``iteration`` and the epoch, the seed of the order of rows.
        iteration: see ``seed``.
        micro_batch_size: rows per micro-batch; without effect if there is a ``token_budget``.
        token_budget: tokens per micro-batch, padding counted.
        packed: a micro-batch has no padding.
        episodes: of each row, what the segments of its episode share; default: each row is an episode.

    Raises:
        TrainingError: a row is longer than ``token_budget``.
    """
    trainable = np.flatnonzero(np.asarray(num_actions))
    if not len(trainable):
        return []
    segments: dict[Hashable, list[int]] = {}
    for row in trainable.tolist():
        segments.setdefault(row if episodes is None else episodes[row], []).append(row)
    of_episode = list(segments.values())
    num_steps = -(-len(of_episode) // samples_per_step)
    steps = []
    for epoch in range(max_epochs):
        order = np.random.default_rng([seed, iteration, epoch]).permutation(len(of_episode))
        for part in np.array_split(order, num_steps):
            drawn = [of_episode[number] for number in part]
            step = plan_step(
                [row for rows in drawn for row in rows],
                lengths,
                num_actions,
                world_size=world_size,
                micro_batch_size=micro_batch_size,
                token_budget=token_budget,
                packed=packed,
                epoch=epoch,
            )
            steps.append(
                replace(step, num_sequences=len(drawn), episode_tokens=_tokens_of_segments(drawn, num_actions))
            )
    return steps


def _tokens_of_segments(episodes: Sequence[Sequence[int]], num_actions: Sequence[int]) -> dict[int, int]:
    """See ``OptimizerStep.episode_tokens``."""
    return {
        row: sum(int(num_actions[segment]) for segment in rows) for rows in episodes if len(rows) > 1 for row in rows
    }


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the rows of a rank become micro-batches: see ``plan_step``."""

    rows: int
    tokens: int | None
    packed: bool

    def of(self, share: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """The rows of each micro-batch; ``share`` is sorted by length, longest first."""
        if self.tokens is None:
            return _deal_rows(share, self.rows) if self.packed else _cut_by_rows(share, self.rows)
        return (_fill if self.packed else _cut_by_tokens)(share, lengths, self.tokens)


def _plan_rows(rows: Sequence[int], lengths: Sequence[int], world_size: int, cut: _Cut) -> RankPlans:
    if not rows:
        return tuple(() for _ in range(world_size))
    longest_first = sorted(rows, key=lambda row: (-lengths[row], row))
    _check_budget(longest_first[0], lengths, cut.tokens)
    plans = [
        [MicroBatch(tuple(batch)) for batch in cut.of(share, lengths)]
        for share in _balance(longest_first, lengths, world_size)
    ]
    count = max(len(plan) for plan in plans)
    shortest = longest_first[-1]
    return tuple(_stretch(plan, count, shortest) for plan in plans)


def _check_budget(longest: int, lengths: Sequence[int], token_budget: int | None, noun: str = "row") -> None:
    if token_budget is not None and lengths[longest] > token_budget:
        raise TrainingError(
            f"{noun} {longest} has {lengths[longest]} tokens, but a micro-batch may hold {token_budget}: "
            "raise train.max_tokens_per_gpu (or rollout.max_tokens_per_gpu), or lower data.max_len"
        )


def _balance(longest_first: Sequence[int], lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Each row to the rank with the fewest tokens so far: at most 4/3 of the best possible (Graham 1969)."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for row in longest_first:
        rank = min(range(world_size), key=lambda r: (tokens[r], len(shares[r]), r))
        shares[rank].append(row)
        tokens[rank] += lengths[row]
    return shares


def _cut_by_rows(share: list[int], micro_batch_size: int) -> list[list[int]]:
    """As few micro-batches as the size allows, as equal as possible, each of similar lengths: little padding."""
    count = -(-len(share) // micro_batch_size)
    bounds = [i * len(share) // count for i in range(count + 1)] if count else []
    return [share[start:end] for start, end in pairwise(bounds)]


def _deal_rows(share: list[int], micro_batch_size: int) -> list[list[int]]:
    """As many, each of all lengths: little difference between the tokens of the largest and of the smallest."""
    count = -(-len(share) // micro_batch_size)
    return [share[k::count] for k in range(count)]


def _cut_by_tokens(share: list[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Rows while they fit; the first one of a micro-batch is its longest, so it sets the padded width."""
    batches: list[list[int]] = []
    for row in share:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _fill(share: list[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Each row into the first micro-batch that has room: at most 11/9 of the fewest possible, and one (Dósa 2007)."""
    batches: list[list[int]] = []
    room: list[int] = []
    for row in share:
        k = next((k for k, free in enumerate(room) if free >= lengths[row]), len(batches))
        if k == len(batches):
            batches.append([])
            room.append(token_budget)
        batches[k].append(row)
        room[k] -= lengths[row]
    return batches


def _stretch(plan: list[MicroBatch], count: int, filler_row: int) -> tuple[MicroBatch, ...]:
    """The same rows in ``count`` micro-batches: the ones with most rows are halved, then fillers are added."""
    while len(plan) < count:
        widest = max(range(len(plan)), key=lambda k: (len(plan[k].rows), -k), default=None)
        if widest is None or len(plan[widest].rows) < 2:
            plan = [*plan, MicroBatch((filler_row,), filler=True)]
            continue
        rows = plan[widest].rows
        half = len(rows) // 2
        plan = [*plan[:widest], MicroBatch(rows[:half]), MicroBatch(rows[half:]), *plan[widest + 1 :]]
    return tuple(plan)
