"""The segments of an episode laid end to end, so that time runs through it as if its token prefix had never broken.

Only action tokens are laid out: what stands between them is context, which returns step over in any case::

    row 0 (episode 0)   . x x . x            episode 0    x x x x x      row 0's three, then row 1's two
    row 1 (episode 0)   . . x x              episode 1    x x
    row 2 (episode 1)   . x x

So two segments give the same returns and advantages as one row would: a reward of the second is credited to the first, and a
reward of the first is not paid again in the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

Steps = list[list[tuple[int, float]]]  # [B] or [E]: (token, reward)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Where each action token of ``B`` rows lies in ``E`` episodes of at most ``L`` action tokens."""

    episode_B: Tensor  # int64
    token_BT: Tensor  # int64, index of the action token within its episode; meaningless outside the mask
    mask_BT: Tensor  # bool, the rows' action tokens
    mask_EL: Tensor  # bool, the episodes' action tokens: the first ones of each line

    @classmethod
    def of(cls, mask_BT: Tensor, episode_keys: Sequence[Hashable]) -> Joined:
        """Rows with one key are an episode, in the order in which they come."""
        numbers: dict[Hashable, int] = {}
        counts_B = mask_BT.sum(dim=1).tolist()
        episodes: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        for key, count in zip(episode_keys, counts_B, strict=True):
            episode = numbers.setdefault(key, len(numbers))
            if episode == len(lengths):
                lengths.append(0)
            episodes.append(episode)
            starts.append(lengths[episode])
            lengths[episode] += count
        device = mask_BT.device
        token_BT = mask_BT.cumsum(dim=1) - 1 + torch.tensor(starts, dtype=torch.int64, device=device)[:, None]
        length_E = torch.tensor(lengths, dtype=torch.int64, device=device)
        mask_EL = torch.arange(max(lengths, default=0), device=device) < length_E[:, None]
        return cls(torch.tensor(episodes, dtype=torch.int64, device=device), token_BT, mask_BT, mask_EL)

    def join(self, values_BT: Tensor) -> Tensor:
        """``[E, L]`` float64: the values of the action tokens, 0 behind them."""
        joined_EL = torch.zeros(self.mask_EL.shape, dtype=torch.float64, device=values_BT.device)
        joined_EL[self._places] = values_BT[self.mask_BT].double()
        return joined_EL

    def split(self, values_EL: Tensor) -> Tensor:
        """``[B, T]``: the inverse of ``join``, 0 outside the rows' action tokens."""
        values_BT = torch.zeros(self.mask_BT.shape, dtype=values_EL.dtype, device=values_EL.device)
        values_BT[self.mask_BT] = values_EL[self._places]
        return values_BT

    def last(self, values_B: Tensor) -> Tensor:
        """``[E]`` what the last row with an action of each episode has; 0 where none has one."""
        values_E = torch.zeros(len(self.mask_EL), dtype=torch.float64, device=values_B.device)
        for row in self.mask_BT.any(dim=1).nonzero().flatten().tolist():
            values_E[self.episode_B[row]] = values_B[row]  # later rows overwrite earlier ones
        return values_E

    def steps(self, step_rewards: Sequence[Sequence[tuple[int, float]]]) -> Steps:
        """``[E]`` the rows' step rewards at their places in the episodes.

        Raises:
            TrainingError: one lies on a token that the policy did not speak.
        """
        joined: Steps = [[] for _ in range(len(self.mask_EL))]
        for row, steps in enumerate(step_rewards):
            for position, reward in steps:
                if not 0 <= position < self.mask_BT.shape[1] or not self.mask_BT[row, position]:
                    raise TrainingError(
                        f"step reward {reward} of row {row} lies at token {position}, which is not an action token: "
                        "give it the index of the last token of its own turn"
                    )
                joined[int(self.episode_B[row])].append((int(self.token_BT[row, position]), reward))
        return joined

    @property
    def _places(self) -> tuple[Tensor, Tensor]:
        episode_BT = self.episode_B[:, None].expand(self.mask_BT.shape)
        return episode_BT[self.mask_BT], self.token_BT[self.mask_BT]
