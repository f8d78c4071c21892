"""Adapters over a model in 4 bits: what it learns, sends, exports and restores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import training_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

QLORA = ("ds.load_in_4bit=true", "ds.lora.rank=8", "ds.param_dtype=bf16", "actor.adam.lr=0.01")


@pytest.fixture(scope="module")
def ranks():
    pytest.importorskip("bitsandbytes")
    pool = cases.RankPool(1, device="gpu")
    yield pool
    pool.close()


def trained(rank, model, rows, overrides, folder):
    """Its learning, what it sends, and what a second trainer says that loads what it saved."""
    trainer = cases.make_trainer(rank, model, overrides)
    reports = [trainer.update(rows, k) for k in range(6)]
    trainer.export_hf(folder / "hf")
    trainer.save(folder / "state")
    sent = {name: (weight.dtype, tuple(weight.shape)) for name, weight in trainer.named_weights()}
    described = {meta.name: (meta.dtype, meta.shape) for meta in trainer.weight_metadata()}
    second = cases.make_trainer(rank, model, overrides)
    second.load(folder / "state")
    return reports, sent, described, trainer.logprobs(rows), (trainer.weight_digest(), second.weight_digest())


@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_in_4_bits_learns_and_is_exported_unpacked(ranks, tiny_model, tmp_path, stage):
    from transformers import AutoModelForCausalLM

    rows = cases.rewarded(cases.experiences())

    settings = [*QLORA, f"ds.zero_stage={stage}"]
    [(reports, sent, described, logprobs, digests)] = ranks.run(trained, str(tiny_model), rows, settings, tmp_path)

    assert reports[-1].approx_kl < reports[0].approx_kl - 0.05
    began = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    assert sent == described == {name: (p.dtype, tuple(p.shape)) for name, p in began.named_parameters()}
    assert digests[0] == digests[1]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    for i, row in enumerate(rows):
        [(start, end)] = row.action_ranges
        expected = cases.naive_logprobs(exported, row).detach().float()
        np.testing.assert_allclose(logprobs[i][start:end], expected, atol=0.05)  # bf16 has 8 bits
