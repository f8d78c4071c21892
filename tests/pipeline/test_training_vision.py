"""A vision-language model on real DeepSpeed ranks, also where one of them sees no image at all.

The numbers to compare with are made by hand: Hugging Face's whole forward pass, one row at a time, placeholders banned.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import training_cases as cases
import vision_rows

from rlhf_core.data.tiny_vision_model import make_tiny_vision_model
from rlhf_core.vision import VisionProcessor

pytestmark = [pytest.mark.pipeline, pytest.mark.agents]

SEES = ("data.max_images_per_prompt=2",)
FROZEN = (*SEES, "actor.freeze_visual_encoder=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm"))


@pytest.fixture(scope="module")
def processor(folder) -> VisionProcessor:
    return VisionProcessor.load(folder)


@pytest.fixture(scope="module")
def album() -> vision_rows.Album:
    return vision_rows.Album()


@pytest.fixture(scope="module")
def rows(processor, album):
    return vision_rows.mixed_rows(processor, album)


@pytest.fixture(scope="module")
def one_sided(processor, album):
    """Two rows for two ranks, of which only the longer shows an image."""
    return [vision_rows.row(processor, album, text, 4, i) for i, text in enumerate(("<image> here", "nothing here"))]


def hf_model(folder):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def gradient_by_hand(folder, processor, album, rows):
    """PPO's token-mean loss over all rows at once, clip range .2. Name to gradient."""
    model, losses = hf_model(folder), []
    for row in rows:
        [(start, end)] = row.action_ranges
        logprobs = vision_rows.own_logprobs(model, processor, album, row)
        ratio = (logprobs - torch.from_numpy(row.old_logprobs[start:end])).exp()
        advantage = torch.from_numpy(row.advantages[start:end])
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    torch.cat(losses).mean().backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


# --- what the ranks run


def make_trainer(rank, model, album, overrides):
    from rlhf_core.training.policy import PolicyTrainer

    config = cases.config(f"actor.num_gpus_per_node={rank.world_size}", *overrides)
    return PolicyTrainer(config, model, rank, total_steps=100, load_image=album.load)


def gradient(rank, model, album, rows, overrides):
    from deepspeed.utils import safe_get_full_grad

    trainer = make_trainer(rank, model, album, overrides)
    [step] = trainer.plan(rows, iteration=0)
    trainer.engine.train()
    trainer.accumulate(step, rows, kl_coef=0.0)
    trained = [(name, p) for name, p in trainer.hf_model.named_parameters() if p.requires_grad]
    return {name: safe_get_full_grad(p).detach().numpy() for name, p in trained}


def logprobs(rank, model, album, rows, overrides):
    from rlhf_core.training.reference import ReferenceModel

    reference = ReferenceModel(cases.config(*overrides), model, rank, album.load)
    return make_trainer(rank, model, album, overrides).logprobs(rows), reference.logprobs(rows)


def update(rank, model, album, rows, overrides, folder):
    """The weights before and after two updates, exports of both, digests, and what a new trainer has that loads the first."""
    trainer = make_trainer(rank, model, album, overrides)
    before = weights_of(trainer)
    trainer.update(rows, 0)
    trainer.save(folder / "state")
    trainer.update(rows, 1)
    trainer.export_hf(folder / "hf")
    trainer.export_average(folder / "average")
    second = make_trainer(rank, model, album, overrides)
    second.load(folder / "state")
    second.update(rows, 1)
    return before, weights_of(trainer), trainer.weight_digest(), second.weight_digest()


def update_once(rank, model, album, rows, overrides):
    """The weights before and after, and their digest."""
    trainer = make_trainer(rank, model, album, overrides)
    before = weights_of(trainer)
    trainer.update(rows, 0)
    return before, weights_of(trainer), trainer.weight_digest()


def weights_of(trainer):
    return {name: weight.clone().float().numpy() for name, weight in trainer.named_weights()}


# --- tests


def test_gradient_is_that_by_hand_on_two_ranks(two_ranks, folder, processor, album, rows):
    """Micro-batches of two rows, with 0 to 3 images."""
    expected = gradient_by_hand(folder, processor, album, rows)
    settings = [*SEES, "ds.zero_stage=3", "train.micro_batch_size=2"]

    both = two_ranks.run(gradient, folder, album, rows, settings)

    scale = max(np.abs(g).max() for g in expected.values())
    assert all(cases.largest_difference(gradient, expected) < 1e-6 * max(scale, 1) for gradient in both)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_sees_no_image_keeps_step_with_one_that_does(two_ranks, folder, processor, album, one_sided, stage):
    """Without the blank row it would gather no parameter of the vision tower, and have no gradient of it to add."""
    expected = gradient_by_hand(folder, processor, album, one_sided)
    settings = [*SEES, f"ds.zero_stage={stage}", "train.micro_batch_size=1"]

    both = two_ranks.run(gradient, folder, album, one_sided, settings)

    scale = max(np.abs(g).max() for g in expected.values())
    assert all(cases.largest_difference(gradient, expected) < 1e-6 * max(scale, 1) for gradient in both)


def test_policy_and_reference_score_every_row_once(two_ranks, folder, processor, album, rows):
    """Sharded: both gather the vision tower, whoever sees an image."""
    settings = [*SEES, "ds.zero_stage=3", "rollout.micro_batch_size=1"]
    model = hf_model(folder)

    shares = two_ranks.run(logprobs, folder, album, rows, settings)

    for found in ({**shares[0][i], **shares[1][i]} for i in (0, 1)):
        assert sorted(found) == list(range(len(rows)))
        for index, row in enumerate(rows):
            [(start, end)] = row.action_ranges
            with torch.no_grad():
                expected = vision_rows.own_logprobs(model, processor, album, row).numpy()
            assert np.abs(found[index][start:end] - expected).max() < 1e-5


@pytest.mark.parametrize(
    "overrides",
    [
        ["ds.zero_stage=2", "ds.param_dtype=bf16"],
        ["ds.zero_stage=3", "ds.param_dtype=fp32"],
        ["ds.zero_stage=3", "ds.param_dtype=bf16", "ds.use_universal_ckpt=true"],
    ],
    ids=str,
)
def test_a_frozen_visual_encoder_stays_and_all_else_learns(
    two_ranks, folder, processor, album, one_sided, tmp_path, overrides
):
    """Also in the rank that saw no image, in the average and in the exports; and a checkpoint goes on to the same weights."""
    settings = [*FROZEN, "train.enable_ema=true", "actor.gradient_checkpointing_enable=true"]

    both = two_ranks.run(update, folder, album, one_sided, [*settings, *overrides], tmp_path)

    for before, after, digest, restored in both:
        moved = {name for name in before if (before[name] != after[name]).any()}
        assert {name.split(".")[1] for name in moved} == {"text_model", "weight"}
        assert {name.split(".")[1] for name in before.keys() - moved} >= {"vision_model", "connector"}
        assert digest == restored
    exported, average = (exported_weights(tmp_path / name) for name in ("hf", "average"))
    assert all((exported[name] == after[name]).all() for name in after)
    assert all((average[name] == before[name]).all() for name in before.keys() - moved)
    assert any((average[name] != before[name]).any() for name in moved)
    assert VisionProcessor.load(str(tmp_path / "hf")).fingerprint == processor.fingerprint


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_of_the_language_model_alone(two_ranks, folder, album, one_sided, tmp_path, stage):
    """Nothing says that the vision tower is frozen; with ZeRO 2, the rank without an image then needs no blank row."""
    settings = [*SEES, "train.enable_ema=true", f"ds.zero_stage={stage}", "ds.lora.rank=4", "actor.adam.lr=0.01"]

    both = two_ranks.run(update, folder, album, one_sided, settings, tmp_path)

    for before, after, digest, restored in both:
        moved = {name for name in before if (before[name] != after[name]).any()}
        assert len(moved) == 2 * 7
        assert all(name.startswith("model.text_model.layers.") and name.endswith("_proj.weight") for name in moved)
        assert digest == restored
    exported = exported_weights(tmp_path / "hf")
    assert all((exported[name] == after[name]).all() for name in after)


def test_updates_repeat_bit_for_bit_and_teach_the_eye(two_ranks, folder, album, rows):
    settings = [*SEES, "actor.gradient_checkpointing_enable=true"]

    (before, after, digest), (_, _, again) = [
        two_ranks.run(update_once, folder, album, rows, settings)[0] for _ in range(2)
    ]

    assert digest == again
    patches = "model.vision_model.embeddings.patch_embedding.weight"
    assert (before[patches] != after[patches]).any()
    assert before.keys() == dict(hf_model(folder).named_parameters()).keys()  # nothing else is sent to the engines


def exported_weights(folder):
    return {name: weight.float().detach().numpy() for name, weight in hf_model(str(folder)).named_parameters()}
