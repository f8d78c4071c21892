"""Master weights and optimizer states by parameter, so that any number of ranks and any ZeRO stage can go on from them, however
their layers are divided.

::

    rank 0 ─ its fragments ─▶ rank00000-000.safetensors …      one tensor each: "model.norm.weight/exp_avg@64", flat,
    rank 1 ─ its fragments ─▶ rank00001-000.safetensors …      the elements of the parameter from the 64th on
                                        │
    rank n ◀─ of whichever files, just the elements that it is to hold

No rank sends anything to another, neither here nor there, and none holds more than a file's worth of copies; or, where layers
were divided otherwise, than a parameter. What is of a part says so: "….o_proj.weight/exp_avg@64:1.0.2" is of the first of two
parts of dimension 1.

DeepSpeed has a form of its own (``ds_to_universal``). It is made by a second pass over a finished checkpoint, which needs the
whole of it on one disk, knows the states of AdamW only, and cannot read what is saved without ZeRO.
"""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhf_core.errors import TrainingError
from rlhf_core.training.fragments import (
    MASTER,
    MOMENTUM,
    STEP,
    fragments,
    inner_optimizer,
    refresh_parameters,
    whole_momenta,
)
from rlhf_core.training.quantized import whole_form

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from rlhf_core.training.fragments import Fragment
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.tensor_parallel import Cut

FILE_BYTES = 2**30  # of a file, about: what a rank copies to host memory at a time
_KEY = re.compile(r"(?P<name>.+)/(?P<kind>\w+)@(?P<start>\d+)(:(?P<dim>\d+)\.(?P<index>\d+)\.(?P<size>\d+))?")


def save_universal(hf_model: PreTrainedModel, optimizer: Any, folder: Path, rank: RankInfo) -> None:
    """Write what this rank holds. Where all hold the same, each writes every n-th parameter."""
    folder.mkdir(parents=True, exist_ok=True)
    files, size = 0, 0
    held: dict[str, torch.Tensor] = {}
    for key, numbers in _held(hf_model, optimizer, rank):
        held[key] = numbers.detach().to("cpu", copy=True)
        size += numbers.nbytes
        if size >= FILE_BYTES:
            save_file(held, folder / f"rank{rank.rank:05d}-{files:03d}.safetensors")
            files, size, held = files + 1, 0, {}
    if held:
        save_file(held, folder / f"rank{rank.rank:05d}-{files:03d}.safetensors")


def load_universal(hf_model: PreTrainedModel, optimizer: Any, folder: Path) -> None:
    """Go on from what ranks of whatever number, ZeRO stage and division of layers wrote. A collective.

    Raises:
        TrainingError: the files are of another model, damaged, or not all there.
    """
    states = inner_optimizer(optimizer)
    with SavedNumbers(folder) as saved:
        shapes = {name: whole_form(p)[1] for name, p in hf_model.named_parameters() if p.requires_grad}
        if odd := sorted(shapes.keys() ^ saved.parameters):
            raise TrainingError(f"{folder} is of another model: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")
        momenta = list(whole_momenta(hf_model, optimizer))
        beside = {(momentum.name, MOMENTUM) for momentum in momenta}
        for fragment in fragments(hf_model, optimizer):
            for kind in saved.kinds(fragment.name):
                if (fragment.name, kind) not in beside:
                    _numbers(states, fragment, kind).copy_(saved.read(fragment, kind, shapes[fragment.name]))
        for momentum in momenta:
            if MOMENTUM in saved.kinds(momentum.name):
                state = states.state[momentum.key]
                if MOMENTUM not in state:
                    state[MOMENTUM] = torch.zeros(momentum.size, device=momentum.key.device)
                whole = saved.elements(momentum.name, MOMENTUM, 0, momentum.numel, momentum.numel)
                state[MOMENTUM].narrow(0, momentum.offset, momentum.numel).copy_(whole)
    refresh_parameters(optimizer)


@dataclass(frozen=True, slots=True)
class Part:
    """Of a parameter: the ``index``-th of ``size`` equal ones of a dimension."""

    dim: int
    index: int
    size: int

    @classmethod
    def of(cls, cut: Cut | None) -> Part | None:
        """That which a rank has; None: all of it."""
        return None if cut is None else cls(cut.dim, cut.index, cut.size)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part."""
        return (*whole[: self.dim], whole[self.dim] // self.size, *whole[self.dim + 1 :])


class Piece(NamedTuple):
    """Where consecutive elements of one kind of a parameter's numbers are saved."""

    start: int  # of the first, in the flat parameter, or part of it
    end: int
    file: Any  # open
    key: str


class SavedNumbers:
    """The files of a folder as one. Opening reads their headers only.

    Raises:
        TrainingError: there is none, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, ExitStack()
        self._pieces: dict[tuple[str, str, Part | None], list[Piece]] = {}
        self._kinds: dict[str, list[str]] = {}
        files = sorted(folder.glob("rank*.safetensors"))
        if not files:
            raise TrainingError(f"{folder} holds no saved weights: use another checkpoint")
        for file in files:
            self._add(file)
        for (name, kind, _), pieces in self._pieces.items():
            kinds = self._kinds.setdefault(name, [])
            if kind not in kinds:
                kinds.append(kind)
            pieces.sort(key=lambda piece: piece.start)

    def __enter__(self) -> SavedNumbers:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def parameters(self) -> set[str]:
        """Hugging Face's names."""
        return set(self._kinds)

    def kinds(self, name: str) -> list[str]:
        """Of a parameter's numbers: its master weights, and whatever its optimizer keeps."""
        return self._kinds[name]

    def read(self, fragment: Fragment, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        """``[length]`` of a fragment of a parameter of ``shape``; ``[1]`` of a kind that has one number for all elements."""
        if kind == STEP:
            return self.elements(fragment.name, kind, 0, 1, 1)
        name, part = fragment.name, Part.of(fragment.cut)
        if (name, kind, part) in self._pieces:
            return self.elements(name, kind, fragment.start, fragment.length, fragment.numel, part)
        whole = self.whole(name, kind, shape)
        mine = whole if fragment.cut is None else fragment.cut.part(whole)
        return mine.reshape(-1).narrow(0, fragment.start, fragment.length)

    def whole(self, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Of ``shape``, from whichever parts there are.

        Raises:
            TrainingError: as of ``elements``.
        """
        saved = next(part for of, kind_of, part in self._pieces if (of, kind_of) == (name, kind))
        numel = math.prod(shape)
        if saved is None:
            return self.elements(name, kind, 0, numel, numel).view(shape)
        parts = [replace(saved, index=index) for index in range(saved.size)]
        numel //= saved.size
        flat = (self.elements(name, kind, 0, numel, numel, part) for part in parts)
        return torch.cat([part.view(saved.shape(shape)) for part in flat], dim=saved.dim)

    def elements(
        self, name: str, kind: str, start: int, length: int, numel: int, part: Part | None = None
    ) -> torch.Tensor:
        """Elements ``start …`` of ``numel``, of the flat parameter or of a part of it.

        Raises:
            TrainingError: they are not all there, or there are more than ``numel``.
        """
        pieces = self._pieces.get((name, kind, part), [])
        edges = [0, *(edge for piece in pieces for edge in (piece.start, piece.end)), numel]
        if any(left != right for left, right in list(pairwise(edges))[::2]):
            raise TrainingError(
                f"{self._folder} does not hold {name} whole ({kind}, {numel} elements): it is of another model, or a file is "
                "missing; use another checkpoint"
            )
        end = start + length
        parts = [
            piece.file.get_slice(piece.key)[max(start, piece.start) - piece.start : min(end, piece.end) - piece.start]
            for piece in pieces
            if piece.start < end and piece.end > start
        ]
        return torch.cat(parts)

    def _add(self, file: Path) -> None:
        try:
            opened = self._open.enter_context(safe_open(file, framework="pt"))
        except SafetensorError as error:
            raise TrainingError(f"{file} is damaged ({error}): use another checkpoint") from error
        for key in opened.keys():  # noqa: SIM118  it is no mapping
            found = _KEY.fullmatch(key)
            if found is None:
                raise TrainingError(f"{file} holds {key!r}, which is of no parameter: use another checkpoint")
            start, (length,) = int(found["start"]), opened.get_slice(key).get_shape()
            part = None if found["dim"] is None else Part(int(found["dim"]), int(found["index"]), int(found["size"]))
            self._pieces.setdefault((found["name"], found["kind"], part), []).append(
                Piece(start, start + length, opened, key)
            )


def _held(hf_model: PreTrainedModel, optimizer: Any, rank: RankInfo) -> Iterator[tuple[str, torch.Tensor]]:
    """(key in a file, flat numbers) that this rank is to write."""
    states = inner_optimizer(optimizer)
    momenta = list(whole_momenta(hf_model, optimizer))
    beside = {(momentum.name, MOMENTUM) for momentum in momenta}
    for index, fragment in enumerate(fragments(hf_model, optimizer)):
        part = Part.of(fragment.cut)
        if part is None and rank.rank % rank.tensor_parallel_size:
            continue  # the first of the group writes it
        if fragment.replicated and index % rank.replicas != rank.replica:
            continue
        place = "" if part is None else f":{part.dim}.{part.index}.{part.size}"
        for kind in (MASTER, *states.state.get(fragment.key, ())):
            if kind == STEP and fragment.start == 0 and (part is None or part.index == 0):
                yield f"{fragment.name}/{kind}@0", _numbers(states, fragment, kind)
            elif kind != STEP and (fragment.name, kind) not in beside:
                yield f"{fragment.name}/{kind}@{fragment.start}{place}", _numbers(states, fragment, kind)
    for momentum in momenta:
        kept = states.state.get(momentum.key, {}).get(MOMENTUM)
        if kept is not None and momentum.saved_here:
            yield f"{momentum.name}/{MOMENTUM}@0", kept.narrow(0, momentum.offset, momentum.numel)


def _numbers(states: torch.optim.Optimizer, fragment: Fragment, kind: str) -> torch.Tensor:
    """``[length]``, a view of what DeepSpeed and the optimizer use; ``[1]`` of a step. Made, where there is none yet."""
    if kind == MASTER:
        return fragment.of(fragment.key)
    state = states.state[fragment.key]
    if kind == STEP:
        if kind not in state:  # where and of what type torch's own AdamW keeps it
            fused = any(group.get("fused") or group.get("capturable") for group in states.param_groups)
            state[kind] = torch.zeros((), dtype=torch.float32, device=fragment.key.device if fused else "cpu")
        return state[kind].view(1)
    if kind not in state:
        state[kind] = torch.zeros_like(fragment.key, requires_grad=False)
    return fragment.of(state[kind])
