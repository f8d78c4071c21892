"""A classifier on a vision-language model, of each family: Hugging Face has none, and names weights by the class it knows."""

from __future__ import annotations

import pytest
import torch
import training_batches as tb
import transformers

from rlhf_core.errors import TrainingError
from rlhf_core.training.value_model import ValueScorer, load_sequence_model
from rlhf_core.training.visual import visual_parameters
from rlhf_core.vision.classifier import seeing_classifier

pytestmark = pytest.mark.agents

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EYES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES = {"image_size": 56, "patch_size": 14}
QWEN_EYES = {"depth": 2, "hidden_size": 32, "num_heads": 4}
MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}

FAMILIES = {
    "Idefics3": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {**EYES, **PATCHES}},
    "SmolVLM": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {**EYES, **PATCHES}},
    "Qwen2VL": {"text_config": {**TEXT, **MROPE}, "vision_config": {**QWEN_EYES, "embed_dim": 32}},
    "Qwen2_5_VL": {
        "text_config": {**TEXT, **MROPE},
        "vision_config": {**QWEN_EYES, "intermediate_size": 64, "out_hidden_size": 32},
    },
    "Qwen3VL": {
        "text_config": {**TEXT, **MROPE, "head_dim": 8},
        "vision_config": {
            **QWEN_EYES,
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    },
    "Gemma3": {
        "text_config": {**TEXT, "head_dim": 8},
        "vision_config": {**EYES, **PATCHES},
        "mm_tokens_per_image": 4,
    },
    "Llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **EYES, **PATCHES},
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_backbone_and_a_head_and_comes_back_as_it_was_saved(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], image_token_id=299)
    speaker = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    speaker.save_pretrained(tmp_path / "policy")

    critic = load_sequence_model(tb.config(), str(tmp_path / "policy"), seed=3, reads_images=True)
    critic.save_pretrained(tmp_path / "critic")
    again = load_sequence_model(tb.config(), str(tmp_path / "critic"), seed=None, reads_images=True)

    expected, found = (dict(model.base_model.named_parameters()) for model in (speaker, critic))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert critic.score.weight.any()
    own, restored = dict(critic.named_parameters()), dict(again.named_parameters())
    assert own.keys() == restored.keys()
    assert all(torch.equal(restored[name], weight) for name, weight in own.items())
    assert visual_parameters(critic).keys() == visual_parameters(speaker).keys() - {"lm_head.weight"}
    assert type(critic).__name__ == f"{family}ForSequenceClassification"


def test_it_reads_texts_alone_as_well(tmp_path):
    config = transformers.Idefics3Config(**FAMILIES["Idefics3"], image_token_id=299)
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(tmp_path)
    critic = load_sequence_model(tb.config(), str(tmp_path), seed=3, reads_images=False).eval()
    ids_BT = torch.tensor([[5, 6, 7, 8]])
    spoken_BT = torch.tensor([[False, False, True, True]])

    with torch.no_grad():
        values_BT = ValueScorer(critic)(ids_BT, spoken_BT)
        hidden_TH = critic.base_model(input_ids=ids_BT).last_hidden_state[0]

    expected = [0.0, 0.0, *(hidden_TH[1:3] @ critic.score.weight[0]).tolist()]
    assert values_BT[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_weights_that_are_missing_are_refused(tmp_path):
    config = transformers.Idefics3Config(**FAMILIES["Idefics3"], image_token_id=299)
    speaker = transformers.Idefics3ForConditionalGeneration(config)
    kept = {name: weight for name, weight in speaker.state_dict().items() if "connector" not in name}
    speaker.save_pretrained(tmp_path, state_dict=kept)

    with pytest.raises(TrainingError, match=r"lacks weights of a vision-language model: model\.connector"):
        load_sequence_model(tb.config(), str(tmp_path), seed=3, reads_images=True)


def test_models_of_text_need_none():
    assert seeing_classifier(transformers.LlamaConfig()) is None
    assert seeing_classifier(transformers.Qwen3Config()) is None
