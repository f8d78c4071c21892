from __future__ import annotations

import pytest
import torch
import training_batches as tb
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from rlhf_core.config import parse_supervised_config
from rlhf_core.errors import TrainingError
from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.value_model import SequenceScorer, ValueScorer, load_sequence_model

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAD = 9
IDS_BT = torch.tensor([[5, PAD, 7, PAD, 8], [3, 4, 2, PAD, PAD]])
LENGTHS_B = torch.tensor([5, 3])
ACTIONS_BT = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def policy_folder(tmp_path, family, **changes):
    torch.manual_seed(0)
    family[1](family[0](**{**SIZES, **changes})).save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def reward_model_folder(tmp_path, family, **changes):
    torch.manual_seed(0)
    family[2](family[0](**{**SIZES, "pad_token_id": PAD, "num_labels": 1, **changes})).save_pretrained(
        tmp_path / "reward"
    )
    return str(tmp_path / "reward")


def loaded(path, *overrides, seed=3):
    return load_sequence_model(tb.config(*overrides), path, seed).eval()


@torch.no_grad()
def test_scores_are_those_of_hugging_faces_class(tmp_path, family):
    """With the padding token inside rows, and padding behind one of them."""
    path = reward_model_folder(tmp_path, family)
    theirs = AutoModelForSequenceClassification.from_pretrained(path).eval()

    scores_B = SequenceScorer(loaded(path))(IDS_BT, LENGTHS_B)

    torch.testing.assert_close(scores_B, theirs(input_ids=IDS_BT).logits[:, 0], atol=1e-5, rtol=0)
    assert scores_B[0] != scores_B[1]


@torch.no_grad()
def test_a_row_that_ends_with_the_padding_token_is_scored_at_its_end_here_and_after_export(tmp_path, family):
    """The end token is the padding token: Hugging Face's class would take it for padding."""
    model = loaded(reward_model_folder(tmp_path, family, eos_token_id=[2, PAD]))
    ids_BT = torch.tensor([[3, 4, PAD]])

    scores_B = SequenceScorer(model)(ids_BT, torch.tensor([3]))

    model.save_pretrained(tmp_path / "exported")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    torch.testing.assert_close(exported(input_ids=ids_BT).logits[:, 0], scores_B, atol=1e-5, rtol=0)
    assert SequenceScorer(model)(ids_BT, torch.tensor([2])) != scores_B
    with pytest.raises(ValueError, match="no padding token"):
        exported(input_ids=IDS_BT)


@torch.no_grad()
def test_value_of_a_token_comes_from_the_token_before_it(tmp_path, family):
    model = loaded(policy_folder(tmp_path, family))

    values_BT = ValueScorer(model)(IDS_BT, ACTIONS_BT)

    for row, length in enumerate(LENGTHS_B):
        hidden_TH = model.base_model(input_ids=IDS_BT[row : row + 1, :length]).last_hidden_state[0]
        for t in ACTIONS_BT[row].nonzero():
            torch.testing.assert_close(values_BT[row, t], model.score(hidden_TH[t - 1])[:, 0])
    assert not values_BT[~ACTIONS_BT].any()


def test_values_reach_every_weight(tmp_path, family):
    model = loaded(policy_folder(tmp_path, family))

    ValueScorer(model)(IDS_BT, ACTIONS_BT).square().sum().backward()

    assert all(parameter.grad.any() for name, parameter in model.named_parameters())


def test_values_of_no_actions_keep_their_graph(tmp_path, family):
    scorer = ValueScorer(loaded(policy_folder(tmp_path, family)))

    values_BT = scorer(IDS_BT, torch.zeros_like(ACTIONS_BT))
    values_BT.sum().backward()

    assert not values_BT.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in scorer.parameters())


def test_a_new_scorer_has_the_policys_backbone_and_a_head_of_its_seed(tmp_path, family):
    path = policy_folder(tmp_path, family)

    first, same, other = (loaded(path, seed=seed) for seed in (3, 3, 4))

    policy = load_causal_lm(tb.config(), path)
    assert all(torch.equal(p, first.state_dict()[name]) for name, p in policy.base_model.named_parameters("model"))
    assert first.score.bias is None
    assert torch.equal(first.score.weight, same.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)


def test_a_new_head_is_small(tmp_path):
    path = policy_folder(tmp_path, FAMILIES["llama"], hidden_size=1024, num_hidden_layers=1)

    weight = loaded(path).score.weight

    assert weight.std().item() == pytest.approx(1025**-0.5, rel=0.1)
    assert abs(weight.mean().item()) < 0.1 * 1025**-0.5


def test_a_new_head_without_a_seed_is_zero(tmp_path, family):
    assert not loaded(policy_folder(tmp_path, family), seed=None).score.weight.any()


@pytest.mark.parametrize("seed", [3, None])
def test_critic_starts_with_the_reward_models_head(tmp_path, family, seed):
    path = reward_model_folder(tmp_path, family)

    model = loaded(path, seed=seed)

    theirs = AutoModelForSequenceClassification.from_pretrained(path)
    assert all(torch.equal(p, theirs.state_dict()[name]) for name, p in model.named_parameters())


def test_bf16_model_has_fp32_scores(tmp_path):
    model = loaded(policy_folder(tmp_path, FAMILIES["llama"]), "ds.param_dtype=bf16")
    hidden_NH = model.base_model(input_ids=IDS_BT).last_hidden_state[:, 1]

    scores_B = SequenceScorer(model)(IDS_BT, torch.tensor([2, 2]))

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(scores_B, hidden_NH.float() @ model.score.weight[0].float())


def test_supervised_configuration_loads_models_too(tmp_path):
    settings = parse_supervised_config(
        {"model": {"model_name_or_path": "tiny"}, "data": {"dataset": "a.jsonl"}, "ds": {"param_dtype": "bf16"}}
    )
    path = policy_folder(tmp_path, FAMILIES["llama"], attention_dropout=0.5)

    models = load_causal_lm(settings, path), load_sequence_model(settings, path, seed=0)

    assert {model.dtype for model in models} == {torch.bfloat16}
    assert {layer.self_attn.attention_dropout for model in models for layer in model.model.layers} == {0.0}


def test_gpt2_has_such_a_head_too(tmp_path):
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=1, pad_token_id=PAD)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()

    scores_B = SequenceScorer(loaded(str(tmp_path)))(IDS_BT, LENGTHS_B)

    torch.testing.assert_close(scores_B, theirs(input_ids=IDS_BT).logits[:, 0], atol=1e-5, rtol=0)


def test_several_outputs_are_refused(tmp_path, family):
    with pytest.raises(
        TrainingError, match=r"is no sequence classifier with one output: score.weight is \[2, 16\], not \[1, 16\]"
    ):
        loaded(reward_model_folder(tmp_path, family, num_labels=2))


def test_classifier_that_pools_in_its_own_way_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)

    with pytest.raises(TrainingError, match="score of BertForSequenceClassification is not that of its linear layer"):
        loaded(str(tmp_path))


class ScaledScore(LlamaForSequenceClassification):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_classifier_that_changes_its_score_is_refused():
    model = ScaledScore(LlamaConfig(**SIZES, num_labels=1))

    with pytest.raises(TrainingError, match="score of ScaledScore is not that of its linear layer at the last token"):
        ValueScorer(model)


def test_reward_model_is_not_taken_for_a_language_model(tmp_path, family):
    path = reward_model_folder(tmp_path, family, tie_word_embeddings=False)

    with pytest.raises(TrainingError, match="lacks weights of a causal language model: lm_head.weight"):
        load_causal_lm(tb.config(), path)


def test_folder_without_a_model_is_refused_by_name(tmp_path):
    with pytest.raises(TrainingError, match=f"cannot load '{tmp_path}' as a sequence classifier with one output"):
        loaded(str(tmp_path))
