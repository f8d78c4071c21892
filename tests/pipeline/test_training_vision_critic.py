"""A critic that sees, on real DeepSpeed ranks, compared with Hugging Face's backbone and a matrix, one row at a time."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import training_cases as cases
import vision_rows
from safetensors.torch import load_file

from rlhf_core.data.tiny_vision_model import make_tiny_vision_model
from rlhf_core.errors import TrainingError
from rlhf_core.vision import VisionProcessor

pytestmark = [pytest.mark.pipeline, pytest.mark.agents]

GAE = ("algo.advantage.estimator=gae", "data.max_images_per_prompt=2", "critic.value_clip=100", "critic.max_norm=1e9")
RATE = ("critic.adam.lr=1e-3", "critic.lr_scheduler=constant", "critic.lr_warmup_ratio=0")
HEAD = "score.weight"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return str(make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm"))


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory) -> str:
    """A critic that has learned something: a new one says 0."""
    from rlhf_core.training.value_model import load_sequence_model

    path = tmp_path_factory.mktemp("critic") / "seeing"
    shutil.copytree(policy, path)
    load_sequence_model(cases.config(), policy, seed=5, reads_images=True).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def processor(policy) -> VisionProcessor:
    return VisionProcessor.load(policy)


@pytest.fixture(scope="module")
def album() -> vision_rows.Album:
    return vision_rows.Album()


@pytest.fixture(scope="module")
def rows(processor, album):
    return with_returns(vision_rows.mixed_rows(processor, album))


@pytest.fixture(scope="module")
def one_sided(processor, album):
    """Two rows for two ranks, of which only the longer shows an image."""
    texts = ("<image> here", "nothing here")
    return with_returns([vision_rows.row(processor, album, text, 4, i) for i, text in enumerate(texts)])


def with_returns(rows):
    rng = np.random.default_rng(3)

    def on_actions(row):
        numbers_T = np.zeros(len(row.token_ids), np.float32)
        [(start, end)] = row.action_ranges
        numbers_T[start:end] = rng.standard_normal(end - start)
        return numbers_T

    return [replace(row, values=on_actions(row), returns=on_actions(row)) for row in rows]


class ByHand:
    """Hugging Face's backbone of the policy, and the critic's head."""

    def __init__(self, policy, folder, processor, album):
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(policy, dtype=torch.float32).model
        self.head = load_file(f"{folder}/model.safetensors")[HEAD].float().requires_grad_()
        self.processor, self.album = processor, album

    def values(self, row, extra=0):
        ids_1T = torch.from_numpy(np.asarray(row.token_ids, dtype=np.int64))[None]
        shown = self.processor.model_inputs([[self.album.load(image) for image in row.images]], ids_1T)
        hidden_TH = self.model(input_ids=ids_1T, **shown).last_hidden_state[0]
        [(start, end)] = row.action_ranges
        return hidden_TH[start - 1 : end - 1 + extra] @ self.head[0]

    def gradient(self, rows):
        """Of half the squared error, a mean over the action tokens of all rows."""
        errors = []
        for row in rows:
            [(start, end)] = row.action_ranges
            errors.append(self.values(row) - torch.from_numpy(row.returns[start:end]))
        (0.5 * torch.cat(errors).square()).mean().backward()
        found = {f"model.{name}": p.grad.numpy() for name, p in self.model.named_parameters() if p.grad is not None}
        return {**found, HEAD: self.head.grad.numpy()}


# --- what the ranks run


def make_critic(rank, model, album, overrides):
    from rlhf_core.training.critic import CriticTrainer

    config = cases.config(*GAE, *RATE, f"critic.num_gpus_per_node={rank.world_size}", *overrides)
    return CriticTrainer(config, model, rank, total_steps=100, load_image=album.load)


def values(rank, model, album, rows, overrides, bootstrap):
    return make_critic(rank, model, album, overrides).values(rows, bootstrap)


def gradient(rank, model, album, rows, overrides):
    """Of the one optimizer step of an update, before the optimizer sees it."""
    from deepspeed.utils import safe_get_full_grad

    trainer, seen = make_critic(rank, model, album, overrides), {}

    def look():
        trained = [(name, p) for name, p in trainer.hf_model.named_parameters() if p.requires_grad]
        seen.update((name, safe_get_full_grad(p).cpu().numpy().copy()) for name, p in trained)
        return 1.0

    trainer.apply = look
    trainer.update(rows, 0)
    return seen


def update(rank, model, album, rows, overrides, folder):
    """The weights before and after two updates, their digest, and that of a new trainer that goes on from the first."""
    trainer = make_critic(rank, model, album, overrides)
    before = weights_of(trainer)
    trainer.update(rows, 0)
    trainer.save(folder / "state")
    trainer.update(rows, 1)
    trainer.export_hf(folder / "hf")
    second = make_critic(rank, model, album, overrides)
    second.load(folder / "state")
    second.update(rows, 1)
    return before, weights_of(trainer), trainer.weight_digest(), second.weight_digest()


def weights_of(trainer):
    return {name: weight.clone().float().numpy() for name, weight in trainer.named_weights()}


# --- tests


@pytest.mark.parametrize("bootstrap", [False, True], ids=["to_the_last_action", "and_what_follows"])
def test_values_are_those_by_hand(two_ranks, policy, folder, processor, album, rows, bootstrap):
    """Rows with 0, 1 and 2 images, one a micro-batch, so that ranks without any keep step."""
    settings = ["ds.zero_stage=3", "rollout.micro_batch_size=1"]
    hand = ByHand(policy, folder, processor, album)

    shares = two_ranks.run(values, folder, album, rows, settings, bootstrap)

    found = {**shares[0], **shares[1]}
    assert sorted(found) == list(range(len(rows)))
    for index, row in enumerate(rows):
        [(start, end)] = row.action_ranges
        with torch.no_grad():
            expected = hand.values(row, extra=int(bootstrap)).numpy()
        assert np.abs(found[index][start : end + bootstrap] - expected).max() < 1e-5
        assert np.abs(expected).max() > 1e-3


def test_it_looks_at_the_images(two_ranks, folder, processor, album, rows):
    def inverted(row):
        shown = [album.inverted(album.load(image)) for image in row.images]
        images = [image._replace(sha256=kept.sha256) for image, kept in zip(row.images, shown, strict=True)]
        return replace(row, images=tuple(images))

    def said(asked):
        first, second = two_ranks.run(values, folder, album, asked, ["ds.zero_stage=2"], False)
        return first | second

    plain, other = said(rows[:3]), said([inverted(row) for row in rows[:3]])

    assert [len(row.images) for row in rows[:3]] == [0, 1, 2]
    assert [bool(np.abs(plain[index] - other[index]).max() > 1e-4) for index in range(3)] == [False, True, True]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradient_is_that_by_hand_also_where_a_rank_sees_no_image(
    two_ranks, policy, folder, processor, album, one_sided, stage
):
    expected = ByHand(policy, folder, processor, album).gradient(one_sided)
    settings = [f"ds.zero_stage={stage}", "train.micro_batch_size=1"]

    both = two_ranks.run(gradient, folder, album, one_sided, settings)

    scale = max(np.abs(g).max() for g in expected.values())
    assert {name for name in expected if "vision_model" in name}
    for found in both:
        assert cases.largest_difference({name: found[name] for name in expected}, expected) < 1e-6 * max(scale, 1)


@pytest.mark.parametrize(
    "settings",
    [
        ["actor.freeze_visual_encoder=true", "ds.zero_stage=2"],
        ["actor.freeze_visual_encoder=true", "ds.zero_stage=3"],
        ["ds.lora.rank=4", "ds.zero_stage=2"],  # adapters are of the language model alone
    ],
    ids=str,
)
def test_a_new_one_learns_while_its_eyes_stay_goes_on_and_is_exported(
    two_ranks, policy, album, one_sided, tmp_path, settings
):
    from rlhf_core.training.value_model import load_sequence_model

    both = two_ranks.run(update, policy, album, one_sided, settings, tmp_path)

    for before, after, digest, restored in both:
        moved = {name for name in before if (before[name] != after[name]).any()}
        assert {name.split(".")[1] for name in moved} == {"text_model", "weight"}
        assert HEAD in moved
        assert not before[HEAD].any()  # one that knows nothing says nothing
        assert digest == restored
    loaded = load_sequence_model(cases.config(), str(tmp_path / "hf"), seed=None, reads_images=True)
    exported = {name: weight.detach().numpy() for name, weight in loaded.named_parameters()}
    assert all((exported[name] == after[name]).all() for name in after)


def test_reward_models_and_the_like_still_read_text_only(policy):
    from rlhf_core.training.value_model import load_sequence_model

    with pytest.raises(TrainingError, match="cannot load .* as a sequence classifier with one output"):
        load_sequence_model(cases.config(), policy, seed=0)
