"""The rows of a micro-batch as one row without padding, for the backbone only (``ds.packing_samples``).

::

    input_ids_BT   a a a .       packed [1, N]    a a a b b c c c c          hidden [1, N, H]
                   b b . .   ─▶  position_ids     0 1 2 0 1 0 1 2 3   ─▶     those before an action, [N, H],
                   c c c c       cu_seq_lens      0     3   5       9        in the order in which a padded batch has them

What comes after the backbone, the losses among it, is the same with and without packing. The token before an action is of the
same sample, because no sample begins with an action.

Attention stays within a sample. Whether all else in a model does, such as a recurrent state or a convolution over tokens, is
found out by asking it: ``refuse_leaks``.

The tokens of the row may be divided over ranks: ``sequence_parallel``. Whether a model allows that is found out too:
``refuse_splits``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rlhf_core.batching import collate_tokens
from rlhf_core.errors import TrainingError
from rlhf_core.records import ActionRange
from rlhf_core.training.sequence_parallel import WHOLE, Asked, SequenceSplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from rlhf_core.batching import ImageInputs, TokenBatch

PROBE_TOKENS = 16  # of each of the two samples
# What the sample before a token changes, as a share of what it changes where it is seen. The gated delta rule of Qwen3-Next and
# the convolution of LFM2 are above 0.2, rounding is far below.
LARGEST_LEAK = 0.05
# What dividing a row changes in a hidden state, as a share of it: rounding, if attention is all that looks at other tokens.
LARGEST_CHANGE = 0.05


class PackingScorer(nn.Module, ABC):  # type: ignore[misc]
    """A backbone that gets rows padded or packed, and what is made of its hidden states.

    Args:
        backbone: of a model of Hugging Face.
        packs: rows go through it packed. The model was then loaded with ``attention_of``.
    """

    def __init__(self, backbone: nn.Module, packs: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.packs = packs
        self.split = WHOLE  # of a packed row over ranks

    @staticmethod
    @abstractmethod
    def inputs(batch: TokenBatch) -> tuple[Any, ...]:
        """What ``forward`` takes of a batch."""

    def ask_padded(
        self, input_ids_BT: torch.Tensor, images: ImageInputs | None, **wanted: Any
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """What the backbone says of padded rows and of what they show: its output, last hidden states ``[B, T, H]`` without
        those of a blank row, and the ids that it got.
        """
        seen_BT = input_ids_BT
        if images is not None:
            seen_BT = images.add_blank_row(input_ids_BT)
            wanted = {**wanted, **images.tensors}
        output = self.backbone(input_ids=seen_BT, use_cache=False, **wanted)
        rows, width = input_ids_BT.shape
        return output, output.last_hidden_state[:rows, :width], seen_BT

    def ask(
        self, input_ids_BT: torch.Tensor, kept_BT: torch.Tensor, places_N: torch.Tensor, **wanted: Any
    ) -> tuple[Any, Asked]:
        """The backbone's output for the packed rows, as far as its tokens lie on this rank, and who looks at it.

        Args:
            input_ids_BT: padded to the right.
            kept_BT: see ``packed_inputs``.
            places_N: ascending, in the packed row: the tokens whose hidden states are wanted.
            wanted: what else the backbone gets.
        """
        output = self.backbone(**packed_inputs(input_ids_BT, kept_BT, self.split), use_cache=False, **wanted)
        return output, Asked.of(places_N, output.last_hidden_state, self.split)

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Within, each rank computes the whole row."""
        split, self.split = self.split, WHOLE
        try:
            yield
        finally:
            self.split = split


def packed_inputs(input_ids_BT: torch.Tensor, kept_BT: torch.Tensor, split: SequenceSplit = WHOLE) -> dict[str, Any]:
    """What a backbone of Transformers takes: tokens and positions of this rank, bounds of all samples.

    Args:
        input_ids_BT: padded to the right.
        kept_BT: bool, the tokens of each row up to its last one that matters; at least one a row.
        split: over ranks; the row gets a sample of padding at its end where it has no equal parts.
    """
    lengths = kept_BT.sum(dim=1)
    positions_BT = torch.arange(kept_BT.shape[1], device=kept_BT.device).expand_as(kept_BT)
    ids_N, positions_N = input_ids_BT[kept_BT], positions_BT[kept_BT]
    divided: dict[str, Any] = {} if split.size == 1 else {"sequence_split": split}
    if missing := split.padding(len(ids_N)):
        ids_N = nn.functional.pad(ids_N, (0, missing))
        positions_N = torch.cat((positions_N, positions_BT.new_tensor(range(missing))))
        lengths = torch.cat((lengths, lengths.new_tensor([missing])))
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)  # one more than samples
    longest = int(lengths.max())
    return {
        "input_ids": split.mine(ids_N, 0).unsqueeze(0),
        "position_ids": split.mine(positions_N, 0).unsqueeze(0),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        **divided,
    }


def before_actions(action_mask_BT: torch.Tensor, kept_BT: torch.Tensor) -> torch.Tensor:
    """``[N]``, ascending: where in the packed row the token before each action is."""
    return action_mask_BT[kept_BT].nonzero()[:, 0] - 1


def up_to_last_action(action_mask_BT: torch.Tensor) -> torch.Tensor:
    """True at the tokens that matter: nothing that is trained depends on those after the last action of a row.

    That leaves out the padding. The first token of a row always counts, so that no mean is over nothing.
    """
    positions_T = torch.arange(action_mask_BT.shape[1], device=action_mask_BT.device)
    last_B = (positions_T * action_mask_BT).amax(dim=1)
    return positions_T <= last_B.unsqueeze(1)


def refuse_leaks(scorer: PackingScorer, forward: nn.Module, device: torch.device) -> None:
    """Refuse a model in which a sample of a packed row depends on the one before it. A collective; nothing if it does not pack.

    Args:
        scorer: as loaded.
        forward: the scorer, or an engine around it; in eval mode afterwards.
        device: where it computes.

    Raises:
        TrainingError: it does, or its forward pass does not take packed rows.
    """
    if not scorer.packs:
        return
    row, other, joined = _probe_rows(scorer)
    name, advice = type(scorer.backbone).__name__, "set ds.packing_samples=false"
    forward.eval()
    try:  # each of as many tokens, so that rounding does not differ by the shapes
        with scorer.undivided():
            first_TH = _hidden(scorer, forward, [row, other], device)[:PROBE_TOKENS]
            second_TH = _hidden(scorer, forward, [other, row], device)[PROBE_TOKENS:]
            seeing_TH = _hidden(scorer, forward, [joined], device)[PROBE_TOKENS:]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TrainingError(f"{name} does not take packed rows ({error}): {advice}") from error
    leak = float(((second_TH - first_TH).norm(dim=1) / (seeing_TH - first_TH).norm(dim=1)).max())
    if not leak < LARGEST_LEAK:
        raise TrainingError(
            f"{name} carries something from one sample of a packed row to the next, such as a recurrent state "
            f"({leak:.0%} of what seeing that sample would change): {advice}"
        )


def refuse_splits(scorer: PackingScorer, forward: nn.Module, device: torch.device) -> None:
    """Refuse a model whose answer changes when a row is divided over ranks. A collective; nothing if it is not.

    Attention of the model's own, positions it counts by itself, a state carried from token to token: all show.

    Args:
        scorer: as loaded.
        forward: the scorer, or an engine around it; in eval mode afterwards.
        device: where it computes.

    Raises:
        TrainingError: it does, its heads do not divide, or its forward pass does not take such rows.
    """
    if scorer.split.size == 1:
        return
    *_, joined = _probe_rows(scorer)
    name, key = type(scorer.backbone).__name__, f"ds.sequence_parallel_size={scorer.split.size}"
    forward.eval()
    try:
        with scorer.undivided():
            whole_TH = _hidden(scorer, forward, [joined], device)
        parts_TH = _hidden(scorer, forward, [joined], device)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TrainingError(
            f"{name} does not take rows that are divided over ranks ({error}): {key}, set it to 1"
        ) from error
    change = float(((parts_TH - whole_TH).norm(dim=1) / whole_TH.norm(dim=1)).max())
    if not change < LARGEST_CHANGE:
        raise TrainingError(
            f"{name} answers otherwise when a row is divided over ranks ({change:.0%} of a hidden state): it has attention of "
            f"its own, or looks at other tokens outside it; {key}, set it to 1"
        )


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """Made-up tokens, all but the first of them actions."""

    token_ids: NDArray[np.int32]
    temperature: float = 1.0

    @property
    def action_ranges(self) -> tuple[ActionRange, ...]:
        """See the class."""
        return (ActionRange(1, len(self.token_ids)),)


def _probe_rows(scorer: PackingScorer) -> tuple[ProbeRow, ProbeRow, ProbeRow]:
    """A row, another one, and both as one: first the other, then the row."""
    rng, highest = np.random.default_rng(0), min(scorer.backbone.get_input_embeddings().num_embeddings, 100)
    row, other = (ProbeRow(rng.integers(1, highest, PROBE_TOKENS, np.int32)) for _ in range(2))
    return row, other, ProbeRow(np.concatenate((other.token_ids, row.token_ids)))


def _hidden(scorer: PackingScorer, forward: nn.Module, rows: Sequence[ProbeRow], device: torch.device) -> torch.Tensor:
    """fp32 ``[N, H]``: what the backbone says of the packed rows, on every rank."""
    seen: list[torch.Tensor] = []
    hook = scorer.backbone.register_forward_hook(lambda module, inputs, output: seen.append(output.last_hidden_state))
    try:
        with torch.no_grad():
            forward(*scorer.inputs(collate_tokens(rows).to(device)))
    finally:
        hook.remove()
    [hidden_1TH] = seen
    return scorer.split.join(hidden_1TH[0].float())[: sum(len(row.token_ids) for row in rows)]
