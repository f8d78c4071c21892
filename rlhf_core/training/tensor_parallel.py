"""The layers of a model over several ranks (``ds.tensor_parallel_size``): each has some of the heads, and of the MLP's columns.

::

    hidden [B, T, H], ─▶ q, k, v, gate, up: ─▶ this rank's heads, ─▶ o, down: some ─▶ sum over ─▶ hidden,
    the same on all      some rows of W        or columns            columns of W     the ranks   the same

Shoeybi et al. 2019 (arXiv:1909.08053), by the layers of DeepSpeed's AutoTP. Which layers are divided, and how, is what
Transformers says of the model (``base_model_tp_plan``); DeepSpeed guesses it from names, and guesses are not trained here.
Embeddings, norms and the output layer are whole on every rank: they see the same, get the same gradient, and stay the same.

Who reads a parameter whole asks for it here (``whole_of``). ZeRO, below it, divides what a rank has over the groups.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from transformers import PreTrainedModel

    from rlhf_core.training.ranks import RankInfo

COLUMNS = "colwise"  # styles of Transformers' plans, named after W's transpose: rows of W are divided,
ROWS = "rowwise"  # columns of W are
SUMMED = "replicated_with_grad_allreduce"  # whole, but each rank's heads give a part of its gradient
STYLES = (COLUMNS, ROWS, SUMMED)
PROBE_SHAPE = (2, 8)  # rows and tokens
LARGEST_CHANGE = 0.05  # of a hidden state, as a share of it, by dividing the layers: as ``packing`` has it
LEAST_DIVIDED = 0.5  # share of the layers' numbers that a plan has to divide


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Which part of a parameter this rank has: one of ``size`` equal ones of a dimension."""

    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    size: int
    index: int
    group: Any

    @property
    def columns(self) -> bool:
        """True if the part is not one piece of the flat parameter."""
        return self.dim > 0

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A new tensor of ``shape`` from every rank's part. A collective of the group."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        distributed.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=self.dim)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's, a view."""
        length = self.shape[self.dim] // self.size
        return whole.narrow(self.dim, self.index * length, length)


def cut_of(parameter: torch.Tensor) -> Cut | None:
    """None: this rank has all of it."""
    cut: Cut | None = getattr(parameter, "cut", None)
    return cut


def whole_of(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """``data``, laid out as the parameter is on this rank, as the whole parameter is: itself, or a new tensor. A collective."""
    cut = cut_of(parameter)
    return data if cut is None else cut.whole(data)


def divide_layers(hf_model: PreTrainedModel, rank: RankInfo) -> Any:
    """Leave this rank its part of each layer, on its device. A collective; nothing with ``rank.tensor_parallel_size=1``.

    Args:
        hf_model: whole, in host memory, before DeepSpeed or an optimizer has seen it.
        rank: who this process is.

    Returns:
        What ``deepspeed.initialize`` takes as ``mpu``: the groups of ranks. None if nothing is divided.

    Raises:
        TrainingError: Transformers has no plan for the model, or one that is not followed here; its heads do not divide; or it
            answers otherwise when it is divided.
    """
    size = rank.tensor_parallel_size
    if size == 1:
        return None
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.utils import groups

    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(tensor_model_parallel_size=size)
    backbone, name = hf_model.base_model, type(hf_model).__name__
    plan = tensor_parallel_plan(hf_model, size)
    with _plain_attention(hf_model):
        whole_BTH = _probe(backbone)
        _divide(backbone, plan, groups.get_tensor_model_parallel_group())
        hf_model.to(rank.torch_device)
        try:
            parts_BTH = _probe(backbone)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TrainingError(
                f"{name} does not compute with a part of its layers ({error}): {_key(size)}, set it to 1"
            ) from error
    change = float(((parts_BTH - whole_BTH).norm(dim=2) / whole_BTH.norm(dim=2)).max())
    if not change < LARGEST_CHANGE:
        raise TrainingError(
            f"{name} answers otherwise when its layers are divided over ranks ({change:.0%} of a hidden state): {_key(size)}, "
            "set it to 1"
        )
    return groups


def tensor_parallel_plan(hf_model: PreTrainedModel, size: int) -> dict[str, str]:
    """Names of modules in the backbone to what is done to them: one of ``STYLES``.

    Raises:
        TrainingError: as of ``divide_layers``, before anything is divided.
    """
    backbone, name, advice = hf_model.base_model, type(hf_model).__name__, f"{_key(size)}, set it to 1"
    styles = getattr(hf_model.config, "base_model_tp_plan", None)
    if not styles:
        raise TrainingError(f"Transformers has no plan for dividing the layers of {name}: {advice}")
    plan = dict(_matches(backbone, styles))
    for module_name, style in plan.items():
        module = backbone.get_submodule(module_name)
        if style not in STYLES or (style != SUMMED and type(module) is not nn.Linear):
            raise TrainingError(
                f"{name}: {module_name} ({type(module).__name__}, {style!r}) is a layer that is not divided here: {advice}"
            )
    _check_sizes(hf_model, plan, size)
    for module_name in _left_out(backbone, plan):
        raise TrainingError(
            f"{name}: {module_name} stands between divided layers, and Transformers' plan says nothing of it: {advice}"
        )
    if (share := _divided_share(backbone, plan)) < LEAST_DIVIDED:
        raise TrainingError(
            f"{name} would be divided to {share:.0%} only (its experts would stay whole on every rank): {advice}, and use "
            "ds.zero_stage=3"
        )
    return plan


def total_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Of the whole model's gradient, each of its numbers counted once. A collective where layers are divided."""
    learned = [parameter for parameter in parameters if parameter.grad is not None]
    cuts = [cut for parameter in learned if (cut := cut_of(parameter)) is not None]
    counted = [p.grad for p in learned if not cuts or cuts[0].index == 0 or cut_of(p) is not None]
    norm = torch.nn.utils.get_total_norm(counted)
    if cuts:
        squared = norm.square()
        distributed.all_reduce(squared, group=cuts[0].group)
        norm = squared.sqrt()
    return float(norm)


def _key(size: int) -> str:
    return f"ds.tensor_parallel_size={size}"


def _matches(backbone: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name of a module, style): in the plan's patterns ``*`` is one part of a name. Embeddings, which need not be divided, are
    left out."""
    patterns = [(re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")), style) for pattern, style in styles.items()]
    for name, module in backbone.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name) and not isinstance(module, nn.Embedding):
                yield name, style


def _check_sizes(hf_model: PreTrainedModel, plan: Mapping[str, str], size: int) -> None:
    """Heads are divided whole, and everything into equal parts."""
    name, text = type(hf_model).__name__, hf_model.config.get_text_config()
    sizes = {
        "heads": getattr(text, "num_attention_heads", None),
        "key-value heads": getattr(text, "num_key_value_heads", None),
    }
    for module_name, style in plan.items():
        if style != SUMMED:
            layer = hf_model.base_model.get_submodule(module_name)
            what = "rows" if style == COLUMNS else "columns"
            sizes[f"{what} of {module_name}"] = layer.out_features if style == COLUMNS else layer.in_features
    for what, count in sizes.items():
        if count is not None and count % size:
            raise TrainingError(f"{_key(size)} does not divide the {count} {what} of {name}: use a divisor of them")


def _left_out(backbone: nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """Modules and parameters beside a divided layer that the plan does not name: part of their gradient would be missing."""
    for block_name in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style != SUMMED):
        block = backbone.get_submodule(block_name)
        for name, _ in block.named_parameters():
            if f"{block_name}.{name}".rpartition(".")[0] not in plan:
                yield f"{block_name}.{name}"


def _divided_share(backbone: nn.Module, plan: Mapping[str, str]) -> float:
    """Of the numbers that are no embeddings."""
    tables = {id(p) for m in backbone.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    total = sum(p.numel() for p in backbone.parameters() if id(p) not in tables)
    layers = (backbone.get_submodule(name) for name, style in plan.items() if style != SUMMED)
    divided = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return float(divided / total)


def _divide(backbone: nn.Module, plan: Mapping[str, str], group: Any) -> None:
    """Put DeepSpeed's layers in the place of torch's: they take over the parameters, and keep this rank's part of the data."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    size, index = distributed.get_world_size(group), distributed.get_rank(group)
    for name, style in plan.items():
        layer = backbone.get_submodule(name)
        if style == SUMMED:
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(_summed_over(group))
            continue
        divided = (
            {"weight": 0, "bias": 0} if style == COLUMNS else {"weight": 1}
        )  # a row layer adds its bias to the sum
        shapes = {of: tuple(parameter.shape) for of, parameter in layer.named_parameters()}
        kind = LinearLayer if style == COLUMNS else LinearAllreduce
        backbone.set_submodule(name, kind(layer, group, name=name))
        for of, shape in shapes.items():
            if of in divided:
                backbone.get_submodule(name).get_parameter(of).cut = Cut(shape, divided[of], size, index, group)


def _summed_over(group: Any) -> Any:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.contiguous().clone()
        distributed.all_reduce(whole, group=group)
        return whole

    return hook


@contextmanager
def _plain_attention(hf_model: PreTrainedModel) -> Iterator[None]:
    """Within, attention is the model's own code, which computes on any device."""
    own = hf_model.config._attn_implementation
    hf_model.set_attn_implementation("eager")
    try:
        yield
    finally:
        hf_model.set_attn_implementation(own)


def _probe(backbone: nn.Module) -> torch.Tensor:
    """fp32 ``[B, T, H]`` in host memory: what the backbone says of made-up rows."""
    embedding = backbone.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(1, min(embedding.num_embeddings, 100), PROBE_SHAPE, generator=generator)
    training = backbone.training
    backbone.eval()
    with torch.no_grad():
        output = backbone(input_ids=ids_BT.to(embedding.weight.device), use_cache=False)
    backbone.train(training)
    return output.last_hidden_state.float().cpu()
