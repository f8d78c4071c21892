"""What one optimizer step adds up to, over its micro-batches and over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class LossPart:
    """What one micro-batch adds to its optimizer step."""

    loss: torch.Tensor  # scalar with a graph
    sums: torch.Tensor  # [K] float64, detached: statistics that add up, named by the objective
    peaks: Mapping[str, torch.Tensor] = field(default_factory=dict)  # scalars, detached: of each the largest counts


class StepTally:
    """The sum of the parts of one step on one rank; after ``reduce`` that of all ranks.

    Args:
        names: of the sums of its parts.
        device: of its parts.
        counts: False: another rank counts the same parts (sequence parallelism), and the sums of this one are left out.
    """

    def __init__(self, names: Sequence[str], device: torch.device, counts: bool = True) -> None:
        self._names, self._counts = tuple(names), counts
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._peaks: dict[str, torch.Tensor] = {}
        self._finite = torch.ones((), dtype=torch.float64, device=device)  # 1 while every loss was finite

    def add(self, part: LossPart) -> None:
        """Count one micro-batch."""
        self._sums += part.sums
        for name, peak in part.peaks.items():
            before = self._peaks.get(name, torch.zeros_like(self._finite))
            self._peaks[name] = torch.maximum(before, peak.double())
        self._finite = self._finite * torch.isfinite(part.loss.detach()).double()

    def reduce(self) -> bool:
        """Make the tally that of all ranks (a collective). True if every loss of the step is finite.

        Every rank has counted a micro-batch, and all of them have the same peaks.
        """
        if not self._counts:
            self._sums.zero_()
        extremes = torch.stack([*(peak.nan_to_num(torch.inf) for peak in self._peaks.values()), -self._finite])
        distributed.all_reduce(self._sums)
        distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX)
        self._peaks, self._finite = dict(zip(self._peaks, extremes[:-1], strict=True)), -extremes[-1]
        return bool(self._finite.item())

    @property
    def sums(self) -> dict[str, float]:
        """By name."""
        return dict(zip(self._names, self._sums.tolist(), strict=True))

    @property
    def peaks(self) -> dict[str, float]:
        """The largest of the parts, at least 0, by name."""
        return {name: float(peak) for name, peak in self._peaks.items()}


class StepsTally:
    """What the optimizer steps of one update, or of one iteration, add up to."""

    def __init__(self, names: Sequence[str]) -> None:
        self.sums = dict.fromkeys(names, 0.0)  # over the applied steps
        self.peaks: dict[str, float] = {}
        self.skipped = 0  # steps that changed nothing
        self._grad_norms: list[float] = []

    def add(self, step: StepTally | None, grad_norm: float | None) -> None:
        """Count a step, its tally reduced; ``grad_norm`` None: it was skipped, and its tally does not count."""
        if step is None or grad_norm is None:
            self.skipped += 1
            return
        for name, value in step.sums.items():
            self.sums[name] += value
        for name, peak in step.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, 0.0), peak)
        self._grad_norms.append(grad_norm)

    @property
    def applied(self) -> int:
        """Steps that changed the weights."""
        return len(self._grad_norms)

    @property
    def grad_norm(self) -> float:
        """Before clipping, the mean over the applied steps; 0 without one."""
        return sum(self._grad_norms) / max(self.applied, 1)


def no_loss(graph: torch.Tensor, width: int) -> LossPart:
    """Nothing, with a graph through the whole model, so that this rank takes part in the backward of the others.

    Args:
        graph: what the model answered for the filler rows.
        width: statistics of the objective.
    """
    return LossPart(graph.sum() * 0.0, torch.zeros(width, dtype=torch.float64, device=graph.device))
