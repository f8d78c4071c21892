from __future__ import annotations

import training_batches as tb
from torch import nn

from rlhf_core.training.optimizers import make_optimizer


def optimizer_of(module, *overrides, heads=()):
    return make_optimizer(module, frozenset(id(p) for p in heads), tb.config(*overrides).actor)


def shapes(group):
    return [tuple(p.shape) for p in group["params"]]


def test_adamw_follows_the_configuration():
    made = optimizer_of(
        nn.Linear(2, 3), "actor.adam.lr=3e-4", "actor.adam.weight_decay=0.1", "actor.adam.betas=[.8,.9]"
    )

    matrix = made.param_groups[0]
    assert (matrix["lr"], matrix["weight_decay"], matrix["betas"], matrix["eps"]) == (3e-4, 0.1, (0.8, 0.9), 1e-8)


def test_biases_norms_and_frozen_parameters_are_not_decayed():
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1, bias=False))
    module[2].weight.requires_grad_(False)

    decayed, plain = optimizer_of(module, "actor.adam.weight_decay=0.1").param_groups

    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert shapes(decayed) == [(3, 2)]
    assert shapes(plain) == [(3,), (3,), (3,)]


def test_muon_takes_the_matrices_inside_and_leaves_tables_heads_and_vectors_to_adamw():
    module = nn.Sequential(nn.Embedding(7, 2), nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 7, bias=False))
    settings = ["actor.optim=muon", "actor.muon.lr=.01", "actor.adam.lr=1e-3", "actor.adam.weight_decay=0.1"]

    matrices, decayed, plain = optimizer_of(module, *settings, heads=[module[3].weight]).param_groups

    assert (shapes(matrices), matrices["lr"], matrices["weight_decay"]) == ([(3, 2)], 0.01, 0.1)
    assert (shapes(decayed), decayed["lr"], decayed["weight_decay"]) == ([(7, 2), (7, 3)], 1e-3, 0.1)
    assert (shapes(plain), plain["weight_decay"]) == ([(3,), (3,), (3,)], 0.0)
