"""A vision-language model as a scorer, against Hugging Face's own whole forward pass. Tiny, random, in this process."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import training_batches as tb
import vision_rows
from transformers import AutoModelForImageTextToText

from rlhf_core.data.tiny_vision_model import make_tiny_vision_model
from rlhf_core.errors import ConfigError, DataError, TrainingError
from rlhf_core.training.ahead import ahead
from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.model import LogprobHead, TokenScorer
from rlhf_core.training.visual import ImageReader, freeze_visual_encoder, load_policy_model, visual_parameters
from rlhf_core.vision import VisionProcessor

pytestmark = pytest.mark.agents


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm"))


@pytest.fixture(scope="module")
def processor(folder) -> VisionProcessor:
    return VisionProcessor.load(folder)


@pytest.fixture
def model(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def album() -> vision_rows.Album:
    return vision_rows.Album()


def scores(scorer, batch):
    return scorer(batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=True, images=batch.images)


def reader(processor, album, blank_rows=True):
    return ImageReader(processor, album.load, blank_rows)


def test_a_batch_of_rows_with_0_1_and_2_images_scores_each_as_if_alone(model, processor, album):
    rows = vision_rows.mixed_rows(processor, album, temperature=0.7)
    scorer = TokenScorer(model, chunk=64, banned_ids=processor.placeholder_ids)

    with torch.no_grad():
        logprobs_BT = scores(scorer, reader(processor, album).tokens(rows)).logprobs_BT

        for row, logprobs_T in zip(rows, logprobs_BT, strict=True):
            [(start, end)] = row.action_ranges
            expected = vision_rows.own_logprobs(model, processor, album, row)
            torch.testing.assert_close(logprobs_T[start:end], expected, atol=1e-5, rtol=0)


def test_another_image_of_the_same_size_gives_other_logprobs(model, processor, album):
    """The control: were images ignored, or mixed up, the comparison above would show nothing."""
    [row] = [vision_rows.row(processor, album, "what <image>", 8)]
    other = album.inverted(album.load(row.images[0]))
    swapped = replace(row, images=(row.images[0]._replace(sha256=other.sha256),))
    scorer, read = TokenScorer(model, chunk=64), reader(processor, album)

    with torch.no_grad():
        right, wrong = [scores(scorer, read.tokens([each])).logprobs_BT for each in (row, swapped)]

    assert (right - wrong).abs().max() > 0.1


def test_the_gradient_is_that_of_the_whole_forward_pass_by_hand(model, processor, album):
    rows = vision_rows.mixed_rows(processor, album)
    scorer = TokenScorer(model, chunk=8, banned_ids=processor.placeholder_ids)
    sum(vision_rows.own_logprobs(model, processor, album, row).sum() for row in rows).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    scores(scorer, reader(processor, album).tokens(rows)).logprobs_BT.sum().backward()

    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * scale, rtol=0, msg=name)


def test_a_blank_row_reaches_the_vision_tower_and_changes_nothing(model, processor, album):
    rows = [vision_rows.row(processor, album, "no image", n, n) for n in (2, 3)]
    scorer = TokenScorer(model, chunk=64)
    blank, none = reader(processor, album).tokens(rows), reader(processor, album, blank_rows=False).tokens(rows)

    answers = [scores(scorer, batch) for batch in (blank, none)]
    answers[0].logprobs_BT.sum().backward()

    torch.testing.assert_close(answers[0].logprobs_BT, answers[1].logprobs_BT, atol=1e-5, rtol=0)
    assert answers[0].logprobs_BT.shape == answers[1].entropy_BT.shape
    assert none.images.tensors == {}
    assert all(not parameter.grad.any() for parameter in visual_parameters(model).values())
    assert model.lm_head.weight.grad.any()


def test_a_batch_with_an_image_gets_no_blank_row(processor, album):
    rows = vision_rows.mixed_rows(processor, album)

    assert reader(processor, album).tokens(rows).images.blank_T is None


def test_placeholders_have_no_probability_left(model, processor):
    scorer = TokenScorer(model, chunk=64, banned_ids=processor.placeholder_ids)

    hidden = torch.zeros((1, model.lm_head.in_features))
    target = torch.tensor([processor.image_token_id])
    logprob_N, _ = scorer.head(hidden, target, torch.ones(1), want_entropy=False)

    assert logprob_N[0] < -100.0


def test_the_ban_is_no_weight_of_the_model(model, processor):
    banned, free = [TokenScorer(model, chunk=8, banned_ids=ids) for ids in (processor.placeholder_ids, ())]

    assert banned.state_dict().keys() == free.state_dict().keys()
    assert [name for name, _ in banned.named_parameters()] == [name for name, _ in free.named_parameters()]


def test_an_output_layer_with_a_bias_keeps_it_under_the_ban():
    layer = torch.nn.Linear(4, 6)
    hidden, targets = torch.randn(5, 4), torch.tensor([0, 1, 3, 4, 5])

    logprobs_N, _ = LogprobHead(layer, 8, banned_ids=[2])(hidden, targets, torch.ones(5), want_entropy=False)

    kept = torch.tensor([0, 1, 3, 4, 5])
    expected = layer(hidden)[:, kept].log_softmax(-1)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(logprobs_N, expected)


def test_the_visual_encoder_is_vision_tower_and_connector(model):
    frozen = visual_parameters(model)

    assert {re.match(r"model\.(\w+)", name)[1] for name in frozen} == {"vision_model", "connector"}
    freeze_visual_encoder(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters()} - frozen.keys()
    assert {name.split(".")[1] for name in trained} == {"text_model", "weight"}


def test_a_policy_that_reads_images_is_loaded_whole_and_without_dropout(folder):
    model = load_policy_model(tb.config("ds.param_dtype=bf16"), folder, reads_images=True)

    assert model.dtype == torch.bfloat16
    assert model.config.text_config.attention_dropout == 0.0


def test_a_model_without_a_text_only_class_also_reads_text_only(folder):
    model = load_policy_model(tb.config(), folder, reads_images=False)

    assert type(model).__name__ == "Idefics3ForConditionalGeneration"


def test_supervised_training_of_a_vision_language_model_is_refused(folder):
    with pytest.raises(TrainingError, match="vision-language model"):
        load_causal_lm(tb.config(), folder)


def test_a_text_model_is_refused_for_a_run_with_images(tiny_model):
    with pytest.raises(ConfigError, match="reads text only"):
        ImageReader.of(tb.config("data.max_images_per_prompt=1"), str(tiny_model), lambda image: None, learns=True)


def test_a_run_without_images_has_no_reader(folder):
    assert ImageReader.of(tb.config(), folder, None, learns=True) is None


def test_a_row_that_was_cut_inside_an_image_is_refused(processor, album):
    row = vision_rows.row(processor, album, "<image>", 3)
    kept = row.images[0].end - 3  # inside the last tile
    cut = replace(row, token_ids=np.concatenate([row.token_ids[:kept], row.token_ids[-3:], np.zeros(3, np.int32)]))
    cut = replace(cut, token_ids=np.resize(cut.token_ids, len(row.token_ids)))

    with pytest.raises(DataError, match="image tokens"):
        reader(processor, album).experiences([cut])


def test_work_ahead_keeps_the_order_and_raises_at_its_place():
    made = ahead(lambda number: 6 // number, [3, 2, 0, 1])

    assert [next(made), next(made)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(made)


def test_nothing_is_made_ahead_of_the_first_question():
    asked = []

    made = ahead(asked.append, [1, 2])

    assert asked == []
    next(made)
    assert asked[0] == 1
    assert list(made) == [None]
    assert asked == [1, 2]
