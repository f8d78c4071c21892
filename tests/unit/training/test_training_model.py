from __future__ import annotations

import pytest
import torch
import training_batches as tb
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rlhf_core.errors import TrainingError
from rlhf_core.training.model import TokenScorer, load_causal_lm

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
IDS_BT = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]])
ACTIONS_BT = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]], dtype=torch.bool)
TEMPERATURE_B = torch.tensor([0.7, 1.0])


def llama(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()


def distributions(model, row, length, temperature):
    """Hugging Face's own, on the unpadded row: ``[T, V]``, those that predict tokens 1 ... T - 1."""
    logits_TV = model(input_ids=IDS_BT[row : row + 1, :length]).logits[0, :-1]
    return torch.distributions.Categorical(logits=logits_TV / temperature)


@pytest.mark.parametrize("model", [llama(tied=True), llama(tied=False), gpt2()], ids=["tied", "untied", "gpt2"])
def test_logprobs_and_entropy_are_those_of_the_sampled_distribution_case_66(model):
    with torch.no_grad():
        logprobs_BT, entropy_BT, _ = TokenScorer(model, chunk=2)(IDS_BT, ACTIONS_BT, TEMPERATURE_B, want_entropy=True)

    for row, length, temperature in ((0, 5, 0.7), (1, 2, 1.0)):
        expected = distributions(model, row, length, temperature)
        actions = ACTIONS_BT[row, 1:length]
        torch.testing.assert_close(
            logprobs_BT[row, 1:length][actions], expected.log_prob(IDS_BT[row, 1:length])[actions]
        )
        torch.testing.assert_close(entropy_BT[row, 1:length][actions], expected.entropy()[actions])
    assert not logprobs_BT[~ACTIONS_BT].any()
    assert not entropy_BT[~ACTIONS_BT].any()


def test_output_layer_sees_action_tokens_only(monkeypatch):
    scorer = TokenScorer(llama(tied=True), chunk=8)
    seen = []
    scorer.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))

    scorer(IDS_BT, ACTIONS_BT, TEMPERATURE_B, want_entropy=False)

    assert seen == [(3, 16)]


def test_batch_without_actions_keeps_its_graph():
    scorer = TokenScorer(llama(tied=False), chunk=8)

    logprobs_BT, *_ = scorer(IDS_BT, torch.zeros_like(ACTIONS_BT), TEMPERATURE_B, want_entropy=False)
    logprobs_BT.sum().backward()

    assert not logprobs_BT.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in scorer.parameters())


def test_scorer_shares_the_parameters_of_the_model():
    model = llama(tied=True)

    assert set(map(id, TokenScorer(model, chunk=8).parameters())) == set(map(id, model.parameters()))


def test_model_that_changes_its_logits_is_refused():
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=30.0))

    with pytest.raises(TrainingError, match="Gemma2ForCausalLM changes its logits after the output layer"):
        TokenScorer(model, chunk=8)


def test_model_is_loaded_in_the_asked_type_without_dropout(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.5)).save_pretrained(tmp_path)

    model = load_causal_lm(tb.config("ds.param_dtype=bf16"), str(tmp_path))

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {layer.self_attn.attention_dropout for layer in model.model.layers} == {0.0}


def test_folder_without_a_model_is_refused_by_name(tmp_path):
    with pytest.raises(TrainingError, match=f"cannot load '{tmp_path}' as a causal language model"):
        load_causal_lm(tb.config(), str(tmp_path))
