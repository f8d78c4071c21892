"""The same checks as on CPU, on a GPU: gradients, bf16 training and bit-exact restoring."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_packed_rows_give_the_gradient_of_padded_ones(ranks, tiny_model, attention):
    """In bf16, the type that FlashAttention takes."""
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    rows = cases.experiences(lengths=[3, 90, 17, 40, 8, 61, 5, 24])
    settings = ["ds.param_dtype=bf16", f"ds.attn_implementation={attention}"]
    [padded] = ranks.run(cases.gradient, str(tiny_model), rows, settings)

    [packed] = ranks.run(cases.gradient, str(tiny_model), rows, [*settings, "ds.packing_samples=true"])

    largest = max(abs(gradient).max() for gradient in padded.values())
    assert cases.largest_difference(packed, padded) < 0.05 * largest  # bf16 has 8 bits


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
