"""How old the tokens of a batch are, in policy versions: what is refused, what is reported, what is left out of the loss.

Iteration 7 trains version 7. With ``max_age`` 1, of a sample that lived through a weight sync::

    tokens           p  p  a  a  a  o  a  a       p prompt, a the policy's, o of the environment or a tool
    version                6  6  6     7  7       an age of 1 and of 0: may be trained
    masked (option)        -  -  -     x  x       the last of its versions alone is trained, the others are context

A version that is too old, or newer than what is trained, can only come from a mistake in the pipeline. So it ends the run:
trained on in silence, it would be a wrong gradient that nobody sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.errors import RunFailedError
from rlhf_core.records import ActionRange, action_mask, episodes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rlhf_core.records import Experience, Trajectory, VersionSpan


def check_age(rows: Sequence[Trajectory], iteration: int, max_age: int | None) -> None:
    """Refuse tokens of a version that must not be trained.

    Args:
        rows: that are to be trained.
        iteration: the version that is trained.
        max_age: versions that a token may be behind it; None: any.

    Raises:
        RunFailedError: with the first such token span, and how many rows have one.
    """
    oldest = 0 if max_age is None else iteration - max_age
    found = [(row, span) for row in rows for span in _spoken(row) if not oldest <= span.version <= iteration]
    if not found:
        return
    row, span = found[0]
    raise RunFailedError(
        f"iteration {iteration}: tokens {span.start} to {span.end} of group {row.group_id}, sample {row.sample_index}, segment "
        f"{row.segment_index}, were spoken by policy version {span.version}, but only versions {max(0, oldest)} to {iteration} "
        f"may be trained (train.async_queue_size, rollout.max_age); so it is with {len({row.key for row, _ in found})} of "
        f"{len(rows)} rows. Nothing was trained on them. This is a fault of the pipeline, not of the configuration: please "
        "report it"
    )


def staleness_metrics(rows: Sequence[Trajectory], iteration: int) -> dict[str, float]:
    """How many policy versions lie between the ones that spoke and ``iteration``, the one that is trained.

    ``_max`` and ``_mean`` are over tokens; ``stale_share`` is of tokens that an older version spoke, ``mixed_share`` of
    samples in which several versions did.
    """
    spans = [span for row in rows for span in _spoken(row)]
    if not spans:
        return {}
    ages, lengths = np.array([(iteration - span.version, span.end - span.start) for span in spans]).T
    mixed = [len({span.version for row in episode.rows for span in _spoken(row)}) > 1 for episode in episodes_of(rows)]
    return {
        "rollout/staleness_max": float(ages.max()),
        "rollout/staleness_mean": float(np.average(ages, weights=lengths)),
        "rollout/stale_share": float(np.average(ages > 0, weights=lengths)),
        "rollout/mixed_share": float(np.mean(mixed)),
    }


def newest_only(
    experience: Sequence[Experience], rows: Sequence[Trajectory]
) -> tuple[list[Experience], dict[str, float]]:
    """Leave out of the loss what a sample said before the last weight sync that it lived through.

    The newest version is that of the whole episode: a segment that it did not speak in is left out, and its reward is still
    that of the others. Advantages were computed before, over all tokens.

    Args:
        experience: one for each of ``rows``, in their order.
        rows: what was sampled.

    Returns:
        What is trained, and ``rollout/masked_share``, of all action tokens those that are left out.
    """
    newest = {
        episode.key: max(span.version for row in episode.rows for span in _spoken(row)) for episode in episodes_of(rows)
    }
    kept = [
        _narrowed(made, tuple(span for span in _spoken(row) if span.version == newest[row.key[:2]]))
        for made, row in zip(experience, rows, strict=True)
    ]
    before, after = (sum(made.num_actions for made in listed) for listed in (experience, kept))
    return [made for made in kept if made.num_actions], {"rollout/masked_share": 1 - after / before}


def _spoken(row: Trajectory) -> list[VersionSpan]:
    return [span for span in row.version_spans if span.end > span.start]


def _narrowed(made: Experience, spans: Sequence[VersionSpan]) -> Experience:
    """Only the actions inside ``spans``; every array is 0 outside them, as everywhere."""
    cut = [(max(a.start, s.start), min(a.end, s.end)) for a in made.action_ranges for s in spans]
    ranges = tuple(ActionRange(start, end) for start, end in cut if start < end)
    if ranges == made.action_ranges:
        return made
    mask_T = action_mask(ranges, len(made.token_ids))

    def masked(values_T: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(mask_T, values_T, np.float32(0))

    return replace(
        made,
        action_ranges=ranges,
        rollout_logprobs=masked(made.rollout_logprobs),
        old_logprobs=None if made.old_logprobs is None else masked(made.old_logprobs),
        ref_logprobs=None if made.ref_logprobs is None else masked(made.ref_logprobs),
        values=None if made.values is None else masked(made.values),
        advantages=masked(made.advantages),
        returns=masked(made.returns),
    )
