"""Liger's fused layers against the model's own, on a GPU."""

from __future__ import annotations

import pytest
import torch
import training_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def plain(tiny_model):
    """Gradient of the tiny model, by processes that load no fused layer: Liger's stay in the modelling file they patch."""
    pool = cases.RankPool(1, device="gpu")
    [gradient] = pool.run(cases.gradient, str(tiny_model), cases.experiences())
    pool.close()
    return gradient


@pytest.mark.parametrize("packs", [False, True])
def test_fused_layers_give_the_gradient_of_the_models_own(plain, tiny_model, packs):
    pytest.importorskip("liger_kernel")
    pool = cases.RankPool(1, device="gpu")
    settings = ["ds.use_liger_kernel=true", f"ds.packing_samples={packs}"]

    [fused] = pool.run(cases.gradient, str(tiny_model), cases.experiences(), settings)

    pool.close()
    assert cases.largest_difference(fused, plain) < 1e-4  # other kernels sum in another order
