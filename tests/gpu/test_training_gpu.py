"""The same checks as on CPU, on a GPU: gradients, bf16 training and bit-exact restoring."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "pipeline"))

import training_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def ranks():
    pool = cases.RankPool(1, device="gpu")
    yield pool
    pool.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("size", [2, 8])
def test_gradient_equals_the_naive_one_on_cpu(ranks, tiny_model, stage, size):
    rows = cases.experiences()
    expected = cases.naive_gradient(str(tiny_model), rows)

    settings = [f"ds.zero_stage={stage}", f"train.micro_batch_size={size}"]
    [gradient] = ranks.run(cases.gradient, str(tiny_model), rows, settings)

    assert cases.largest_difference(gradient, expected) < 1e-4  # other kernels sum in another order


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_policy_makes_rewarded_tokens_likelier(ranks, tiny_model, stage):
    rows = cases.rewarded(cases.experiences())

    settings = ["ds.param_dtype=bf16", f"ds.zero_stage={stage}"]
    [(reports, _)] = ranks.run(cases.updates, str(tiny_model), [rows] * 6, settings)

    assert reports[-1].approx_kl < reports[0].approx_kl - 0.05


@pytest.mark.parametrize(("stage", "universal"), [(2, False), (3, False), (0, True), (1, True), (2, True), (3, True)])
def test_a_restored_run_goes_on_bit_for_bit_case_14(ranks, tiny_model, tmp_path, stage, universal):
    batches = [cases.experiences(seed=seed) for seed in range(4)]
    settings = ["ds.param_dtype=bf16", f"ds.zero_stage={stage}", f"ds.use_universal_ckpt={universal}"]
    [(_, digests)] = ranks.run(cases.updates, str(tiny_model), batches, settings)

    [(_, digest, _)] = ranks.run(cases.continued, str(tiny_model), batches, settings, tmp_path)

    assert digest == digests[-1]
