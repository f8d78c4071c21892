"""The optimizer of a model from its settings (``actor.optim``, ``critic.optim``, ``model.optim``).

::

    adam    every parameter by AdamW
    muon    matrices inside the layers by Muon (Jordan et al. 2024, DeepSpeed's), the rest by AdamW

Biases and norms are never decayed. Each group keeps its own peak learning rate; the schedule scales all of them alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from rlhf_core.config.trained import TrainedModelConfig


def make_optimizer(module: nn.Module, output_layers: frozenset[int], settings: TrainedModelConfig) -> Any:
    """The optimizer over the trainable parameters.

    Args:
        module: the model, whole: before DeepSpeed shards it.
        output_layers: ids of the parameters that Muon leaves to AdamW besides embeddings: its heads.
        settings: of the model.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if settings.optim == "muon":
        return _muon(module, trainable, output_layers, settings)
    # Not DeepSpeed's own AdamW, which compiles an op at first use.
    adam = settings.adam
    return torch.optim.AdamW(_decay_groups(trainable, settings), lr=adam.lr, betas=adam.betas, eps=adam.eps, fused=True)


def _muon(
    module: nn.Module, trainable: list[nn.Parameter], output_layers: frozenset[int], settings: TrainedModelConfig
) -> Any:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    tables = {id(p) for m in module.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    for parameter in trainable:  # where DeepSpeed looks
        parameter.use_muon = parameter.ndim == 2 and id(parameter) not in tables | output_layers
    adam, muon = settings.adam, settings.muon
    matrices = [p for p in trainable if p.use_muon]
    others = _decay_groups([p for p in trainable if not p.use_muon], settings)
    groups = [
        {
            "params": matrices,
            "use_muon": True,
            "lr": muon.lr,
            "momentum": muon.momentum,
            "weight_decay": adam.weight_decay,
        },
        *({**group, "use_muon": False, "lr": adam.lr, "betas": adam.betas, "eps": adam.eps} for group in others),
    ]
    return MuonWithAuxAdam([group for group in groups if group["params"]], torch.optim.AdamW, {"foreach": None})


def _decay_groups(trainable: list[nn.Parameter], settings: TrainedModelConfig) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.adam.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
