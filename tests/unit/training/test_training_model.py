from __future__ import annotations

import pytest
import torch
import training_batches as tb
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    OlmoeConfig,
    PhiConfig,
    PhiForCausalLM,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from rlhf_core.errors import TrainingError
from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.model import TokenScorer

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
MODELS = ["tied", "untied", "gpt2", "bias"]
MIXTURES = [MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig, OlmoeConfig]


def llama(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()


def phi():
    """Its output layer has a bias."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}
    model = PhiForCausalLM(PhiConfig(**sizes)).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def mixture(config_class):
    """Four experts, two of them per token."""
    torch.manual_seed(0)
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    experts = "num_local_experts" if config_class is MixtralConfig else "num_experts"
    config = config_class(**SIZES, **sizes, **{experts: 4}, initializer_range=0.5)
    return AutoModelForCausalLM.from_config(config)


def distributions(model, row, length, temperature):
    """Hugging Face's own, on the unpadded row: ``[T, V]``, those that predict tokens 1 ... T - 1."""
    logits_TV = model(input_ids=IDS_BT[row : row + 1, :length]).logits[0, :-1]
    return torch.distributions.Categorical(logits=logits_TV / temperature)


@pytest.mark.parametrize("make", [lambda: llama(tied=True), lambda: llama(tied=False), gpt2, phi], ids=MODELS)
def test_logprobs_and_entropy_are_those_of_the_sampled_distribution_case_66(make):
    model = make()
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


@pytest.mark.parametrize(
    "make", [lambda: llama(tied=True), lambda: llama(tied=False), phi], ids=["tied", "untied", "bias"]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_is_that_of_the_full_logits(make, checkpointing):
    model, expected = make().train(), make()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = 0
    for row, length, temperature in ((0, 5, 0.7), (1, 2, 1.0)):
        p, actions = distributions(expected, row, length, temperature), ACTIONS_BT[row, 1:length]
        loss = loss + (p.log_prob(IDS_BT[row, 1:length]) + 0.1 * p.entropy())[actions].sum()
    loss.backward()

    scores = TokenScorer(model, chunk=2)(IDS_BT, ACTIONS_BT, TEMPERATURE_B, want_entropy=True)
    (scores.logprobs_BT + 0.1 * scores.entropy_BT).sum().backward()

    for (name, parameter), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


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


def test_pickled_weights_are_refused_with_the_remedy(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(
        TrainingError, match=r"\.safetensors files alone, for a \.bin file is a pickle.*save_pretrained"
    ):
        load_causal_lm(tb.config(), str(tmp_path))


def test_reward_model_folder_is_refused(tmp_path):
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(tmp_path)

    with pytest.raises(TrainingError, match="lacks weights of a causal language model: lm_head.weight"):
        load_causal_lm(tb.config(), str(tmp_path))


@pytest.mark.parametrize("config_class", MIXTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_balancing_loss_is_the_models_own_and_trains_its_routers(config_class, checkpointing):
    """Tokens behind the last action of a row are padding here. The model's own forward pass gets a mask of the others."""
    model, theirs = mixture(config_class).train(), mixture(config_class)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counts_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    expected = theirs(input_ids=IDS_BT, attention_mask=counts_BT, output_router_logits=True).aux_loss
    expected.backward()

    scores = TokenScorer(model, chunk=8, balance_experts=True)(IDS_BT, ACTIONS_BT, TEMPERATURE_B, want_entropy=False)
    scores.aux_loss.backward()

    assert scores.aux_loss.item() == pytest.approx(expected.item(), abs=1e-6)
    routers = [name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for name in routers:
        gradient = model.get_parameter(name).grad
        assert gradient.any()
        torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, atol=1e-6, rtol=1e-5)


def test_balancing_loss_does_not_depend_on_the_padding():
    scorer = TokenScorer(mixture(Qwen2MoeConfig), chunk=8, balance_experts=True)
    longer = torch.nn.functional.pad(IDS_BT, (0, 3)), torch.nn.functional.pad(ACTIONS_BT, (0, 3))

    scores, padded = (scorer(*rows, TEMPERATURE_B, want_entropy=False) for rows in ((IDS_BT, ACTIONS_BT), longer))

    torch.testing.assert_close(padded.aux_loss, scores.aux_loss)


def test_balancing_loss_of_rows_without_actions_is_finite():
    scorer = TokenScorer(mixture(MixtralConfig), chunk=8, balance_experts=True)

    assert scorer(IDS_BT, torch.zeros_like(ACTIONS_BT), TEMPERATURE_B, want_entropy=False).aux_loss.isfinite()


@pytest.mark.parametrize(("wanted", "training"), [(False, True), (True, False)])
def test_router_logits_are_asked_for_only_in_updates_that_want_them(wanted, training):
    scorer = TokenScorer(mixture(MixtralConfig), chunk=8, balance_experts=wanted).train(training)
    seen = []
    scorer.backbone.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)

    scores = scorer(IDS_BT, ACTIONS_BT, TEMPERATURE_B, want_entropy=False)

    assert scores.aux_loss is None
    assert "output_router_logits" not in seen[0]


def test_model_without_experts_has_no_balancing_loss():
    with pytest.raises(TrainingError, match="LlamaForCausalLM has no balancing loss"):
        TokenScorer(llama(tied=True), chunk=8, balance_experts=True)
