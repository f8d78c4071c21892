"""Which samples of a run become training data: the best of each prompt, or pairs within a group.

::

    best of n     prompt ─▶ its samples of all chosen iterations ─▶ best first ─▶ the first K, no text twice
    pairs         group  ─▶ (better, worse), never of equal rewards: the best with the worst, or every pair
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Ties: TypeAlias = Literal["newest", "all", "skip"]
Pairing: TypeAlias = Literal["one", "all"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample that could be chosen."""

    iteration: int
    group_id: str
    sample_index: int
    prompt_id: str
    reward: float
    text: int  # hash of the answer

    @property
    def key(self) -> tuple[str, int]:
        """What names it within its iteration."""
        return (self.group_id, self.sample_index)


def best_of(candidates: Iterable[Candidate], count: int, ties: Ties) -> list[Candidate]:
    """The best samples of each prompt, in the order of the log.

    Args:
        candidates: of any number of prompts.
        count: at most so many of each prompt; of equal texts the best counts, once.
        ties: where the last that is chosen is no better than the first that is not: ``newest`` takes the one of the newer
            policy, ``all`` takes both, ``skip`` leaves the prompt out.
    """
    by_prompt: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_prompt.setdefault(candidate.prompt_id, []).append(candidate)
    chosen = [best for of_prompt in by_prompt.values() for best in _best(of_prompt, count, ties)]
    return sorted(chosen, key=_place)


def pairs_of(candidates: Iterable[Candidate], pairing: Pairing, margin: float) -> list[tuple[Candidate, Candidate]]:
    """(better, worse) within each group, in the order of the log; texts and rewards of a pair always differ.

    Args:
        candidates: of any number of groups.
        pairing: ``one``: the best with the worst; ``all``: every pair.
        margin: the least difference of their rewards.
    """
    groups: dict[tuple[int, str], list[Candidate]] = {}
    for candidate in sorted(candidates, key=_place):
        groups.setdefault((candidate.iteration, candidate.group_id), []).append(candidate)
    found: list[tuple[Candidate, Candidate]] = []
    for group in groups.values():
        ranked = sorted(group, key=lambda candidate: -candidate.reward)  # stable: of equal ones the first sampled
        possible = [pair for pair in combinations(ranked, 2) if _is_pair(*pair, margin)]
        # max: of equally wide pairs the first
        found += possible if pairing == "all" else [max(possible, key=_width)] if possible else []
    return found


def _best(candidates: list[Candidate], count: int, ties: Ties) -> list[Candidate]:
    ranked: list[Candidate] = []
    seen: set[int] = set()
    for candidate in sorted(candidates, key=lambda c: (-c.reward, -c.iteration, c.group_id, c.sample_index)):
        if candidate.text not in seen:
            seen.add(candidate.text)
            ranked.append(candidate)
    chosen, rest = ranked[:count], ranked[count:]
    tied = [candidate for candidate in rest if candidate.reward == chosen[-1].reward]
    if not tied or ties == "newest":
        return chosen
    return [*chosen, *tied] if ties == "all" else []


def _is_pair(better: Candidate, worse: Candidate, margin: float) -> bool:
    difference = better.reward - worse.reward
    return difference > 0 and difference >= margin and better.text != worse.text


def _width(pair: tuple[Candidate, Candidate]) -> float:
    return pair[0].reward - pair[1].reward


def _place(candidate: Candidate) -> tuple[int, str, int]:
    return (candidate.iteration, candidate.group_id, candidate.sample_index)
