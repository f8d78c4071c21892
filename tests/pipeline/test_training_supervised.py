"""SFT, reward models and DPO on real ranks, held against losses written by hand on Hugging Face's own forward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import training_cases as cases
from torch.nn.functional import logsigmoid

from rlhf_core.config import parse_supervised_config
from rlhf_core.data import (
    PreferenceExample,
    SftExample,
    Transcript,
    held_out_examples,
    load_tokenizer,
    make_tiny_model,
    supervised_examples,
)
from rlhf_core.records import ActionRange, PromptCursor

pytestmark = pytest.mark.pipeline

TASK = Path(__file__).parents[2] / "configs/tasks/preferences.py"
EOS, PAD = 258, 259  # of the tiny model
POISON = 300  # a token that the poisoned model has no number for
KINDS = {
    "sft": ("sft", []),
    "sft by rows": ("sft", ["train.loss_agg_mode=sample"]),
    "reward model": ("reward_model", ["reward_model.center_coef=0.1"]),
    "dpo": ("dpo", ["dpo.beta=0.5"]),
    "cdpo with likelihood": ("dpo", ["dpo.label_smoothing=0.2", "dpo.nll_coef=0.5"]),
    "ipo": ("dpo", ["dpo.loss=ipo", "dpo.beta=0.5"]),
}
METHODS = ["sft", "reward model", "dpo"]
VARIANTS = [kind for kind in KINDS if kind not in METHODS]
ZERO_3 = "ds.zero_stage=3"


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """By method: what is trained. ``reference``: the DPO reference, another model than the policy."""
    folder = tmp_path_factory.mktemp("supervised")
    classifier = saved_classifier(folder / "classifier", tiny_model)
    reference = str(make_tiny_model(folder / "reference", seed=1))
    return {"sft": str(tiny_model), "dpo": str(tiny_model), "reward_model": classifier, "reference": reference}


def saved_classifier(folder, tiny_model):
    """A reward model with a head of its own, and the tiny model's tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


def transcript(seed, num_actions, prompt=3, tail=0, last=EOS):
    """``prompt`` tokens, an answer that ends with ``last``, and ``tail`` tokens behind it that do not count."""
    rng = np.random.default_rng(seed)
    end = prompt + num_actions
    token_ids = rng.integers(0, 256, end + tail).astype(np.int32)
    token_ids[end - 1] = last
    return Transcript("", token_ids, (ActionRange(prompt, end),) if num_actions else ())


def sft_example(index, num_actions, **changes):
    row = transcript([7, index], num_actions, **changes)
    return SftExample(row.text, row.token_ids, row.action_ranges, row_id=f"r{index}", datasource="d")


def pair(index, chosen, rejected, margin=0.0, **changes):
    answers = [transcript([7, index, k], count, **changes) for k, count in enumerate((chosen, rejected))]
    return PreferenceExample(f"p{index}", "d", *answers, margin)


def examples_of(method, count=8):
    """Answers of 1 to 8 tokens; one of several turns; pairs of unequal answers, some with a tail and a margin."""
    if method == "sft":
        rows = [sft_example(i, i + 1, tail=i % 2) for i in range(count)]
        turns = (ActionRange(1, 3), ActionRange(5, len(rows[-1].token_ids)))
        return [*rows[:-1], replace(rows[-1], action_ranges=turns)]
    return [pair(i, i + 1, count - i, margin=0.3 * (i % 3), tail=i % 2) for i in range(count)]


# --- by hand ---------------------------------------------------------------------------------------------------------


def naive_logprobs(model, row):
    """One unpadded row through the whole model: log-probs of the trained tokens."""
    ids_1T = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    logp_TV = model(input_ids=ids_1T).logits[0].float().log_softmax(-1)
    positions = torch.cat([torch.arange(start, end) for start, end in row.action_ranges])
    return logp_TV[positions - 1, ids_1T[0, positions]]


def naive_score(model, row):
    """Hugging Face's score of the text that ends where the answer ends."""
    ids_1T = torch.from_numpy(row.token_ids[: row.action_ranges[-1].end].astype(np.int64))[None]
    return model(input_ids=ids_1T).logits[0, 0]


def naive_log_ratio(policy, reference, row, mean):
    with torch.no_grad():
        expected = naive_logprobs(reference, row)
    ratios = naive_logprobs(policy, row) - expected
    return ratios.mean() if mean else ratios.sum()


def naive_loss(kind, model, reference, examples):
    """The loss of all examples at once, with the settings of ``KINDS``."""
    if kind == "sft":
        return -torch.cat([naive_logprobs(model, row) for row in examples]).mean()
    if kind == "sft by rows":
        return -torch.stack([naive_logprobs(model, row).mean() for row in examples]).mean()
    if kind == "reward model":
        scores = [(naive_score(model, p.chosen), naive_score(model, p.rejected), p.margin) for p in examples]
        return torch.stack([-logsigmoid(c - r - m) + 0.1 * (c + r) ** 2 for c, r, m in scores]).mean()
    answers = [(p.chosen, p.rejected) for p in examples]
    h = torch.stack(
        [
            naive_log_ratio(model, reference, chosen, kind == "ipo")
            - naive_log_ratio(model, reference, rejected, kind == "ipo")
            for chosen, rejected in answers
        ]
    )
    if kind == "dpo":
        return -logsigmoid(0.5 * h).mean()
    if kind == "ipo":
        return ((h - 1.0) ** 2).mean()
    nll = torch.stack([-naive_logprobs(model, chosen).mean() for chosen, _ in answers])
    return (-0.8 * logsigmoid(0.1 * h) - 0.2 * logsigmoid(-0.1 * h) + 0.5 * nll).mean()


def naive_gradient(kind, models, examples):
    """(loss, name to gradient)."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    method = KINDS[kind][0]
    auto_class = AutoModelForSequenceClassification if method == "reward_model" else AutoModelForCausalLM
    model = auto_class.from_pretrained(models[method])
    reference = AutoModelForCausalLM.from_pretrained(models["reference"]) if method == "dpo" else None
    loss = naive_loss(kind, model, reference, examples)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def by_hand(models):
    """``by_hand(kind)``: loss and gradient on ``examples_of`` its method."""
    known = {}

    def look_up(kind):
        if kind not in known:
            known[kind] = naive_gradient(kind, models, examples_of(KINDS[kind][0]))
        return known[kind]

    return look_up


# --- what the ranks run ----------------------------------------------------------------------------------------------


def config(*overrides):
    base = {
        "model": {"model_name_or_path": "tiny", "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "max_norm": 1e9},
        "data": {"dataset": "pairs.jsonl"},
        "ds": {"zero_stage": 2, "param_dtype": "fp32"},
    }
    return parse_supervised_config(base, ["model.adam.lr=1e-3", *overrides])


def make_trainer(rank, method, models, overrides=(), total_steps=100):
    from rlhf_core.training.pairwise import DpoTrainer, RewardModelTrainer
    from rlhf_core.training.sft import SftTrainer

    settings = config(f"model.num_gpus_per_node={rank.world_size}", *overrides)
    if method == "dpo":
        return DpoTrainer(settings, models["dpo"], rank, total_steps, models["reference"])
    trainer_class = SftTrainer if method == "sft" else RewardModelTrainer
    return trainer_class(settings, models[method], rank, total_steps)


def gradient(rank, kind, models, examples, overrides=()):
    from deepspeed.utils import safe_get_full_grad

    method, of_kind = KINDS[kind]
    trainer = make_trainer(rank, method, models, [*of_kind, *overrides])
    step = trainer.plan(examples)
    trainer.engine.train()
    trainer.sum_gradients(step.micro_batches, partial(trainer.part, step, examples), trainer.sums)
    return {name: safe_get_full_grad(p).detach().cpu().numpy() for name, p in trainer.hf_model.named_parameters()}


def iterations(rank, method, models, batches, overrides=()):
    """One iteration of one step a batch: the metrics, the digest before the first and after each, and the counters."""
    trainer = make_trainer(rank, method, models, overrides)
    digests, metrics = [trainer.weight_digest()], []
    for batch in batches:
        metrics.append(trainer.train_steps([batch]))
        digests.append(trainer.weight_digest())
    return metrics, digests, (trainer.version, trainer.optimizer_steps)


def evaluation(rank, method, models, examples, overrides=()):
    """Metrics of all examples and of three, and whether the weights stayed as they were."""
    trainer = make_trainer(rank, method, models, overrides)
    before = trainer.weight_digest()
    return trainer.evaluate(examples), trainer.evaluate(examples[:3]), trainer.weight_digest() == before


def two_and_two(rank, method, models, batches, overrides, folder):
    """Two iterations, then two by a new trainer that loads what the first one saved: digests, lr and counters."""
    first = make_trainer(rank, method, models, overrides)
    for batch in batches[:2]:
        first.train_steps([batch])
    first.evaluate(batches[0])
    first.save(folder)
    second = make_trainer(rank, method, models, overrides)
    second.load(folder)
    metrics = [second.train_steps([batch]) for batch in batches[2:]]
    return metrics, second.weight_digest(), (second.version, second.optimizer_steps)


def learning(rank, method, models, batches, held_out, overrides):
    """The evaluation before and after one iteration of all batches, and the iteration's metrics."""
    trainer = make_trainer(rank, method, models, overrides)
    before = trainer.evaluate(held_out)
    return before, trainer.train_steps(batches), trainer.evaluate(held_out)


def exported(rank, method, models, batch, examples, folder, overrides=()):
    """Metrics of each example alone, by the trainer that wrote the folder."""
    trainer = make_trainer(rank, method, models, overrides)
    trainer.train_steps([batch])
    trainer.export_hf(folder)
    if trainer.average is not None:
        trainer.export_average(folder.with_name("average"))
    return [trainer.evaluate([example]) for example in examples]


def refusal(rank, method, models, overrides):
    from rlhf_core.errors import TrainingError

    try:
        make_trainer(rank, method, models, overrides)
    except TrainingError as error:
        return str(error)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, size) for kind in METHODS for size in (1, 2, 8)), *((kind, 3) for kind in VARIANTS)]
)
def test_gradient_is_that_of_the_loss_by_hand_case_55(one_rank, models, by_hand, kind, size):
    examples = examples_of(KINDS[kind][0])

    [found] = one_rank.run(gradient, kind, models, examples, [f"train.micro_batch_size={size}"])

    assert cases.largest_difference(found, by_hand(kind)[1]) < 1e-6


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_does_not_depend_on_the_number_of_ranks_case_55(two_ranks, models, by_hand, kind, stage):
    examples = examples_of(KINDS[kind][0])
    settings = [f"ds.zero_stage={stage}", "train.micro_batch_size=3"]

    both = two_ranks.run(gradient, kind, models, examples, settings)

    assert all(cases.largest_difference(found, by_hand(kind)[1]) < 1e-6 for found in both)


@pytest.mark.parametrize("kind", METHODS)
def test_three_examples_over_two_ranks_case_47(two_ranks, models, kind):
    """One rank repeats an example that counts for nothing."""
    examples = examples_of(KINDS[kind][0])[:3]
    _, expected = naive_gradient(kind, models, examples)
    settings = [ZERO_3, "train.micro_batch_size=1", "ds.logprob_chunk=1"]

    both = two_ranks.run(gradient, kind, models, examples, settings)

    assert all(cases.largest_difference(found, expected) < 1e-6 for found in both)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("kind", METHODS)
def test_gradient_does_not_depend_on_how_memory_is_saved(one_rank, models, by_hand, kind, packs):
    memory = ["train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=32", "data.max_len=16", ZERO_3]
    settings = [*memory, f"ds.packing_samples={packs}"]

    [found] = one_rank.run(
        gradient, kind, models, examples_of(KINDS[kind][0]), [*settings, "model.gradient_checkpointing_enable=true"]
    )

    assert cases.largest_difference(found, by_hand(kind)[1]) < 1e-6


@pytest.mark.parametrize("kind", ["sft", "sft by rows", "reward model", "dpo"])
def test_example_without_trained_tokens_changes_nothing_case_53(one_rank, models, by_hand, kind):
    method = KINDS[kind][0]
    empty = sft_example(9, 0) if method == "sft" else pair(9, 4, 0)

    [found] = one_rank.run(gradient, kind, models, [empty, *examples_of(method)])

    assert cases.largest_difference(found, by_hand(kind)[1]) < 1e-6


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_balancing_loss_of_a_mixture_of_experts_is_added(one_rank, tmp_path, method):
    """All examples in one micro-batch, where the balancing loss is one number."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
    from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    moe = {**experts, **sizes, "vocab_size": 320, "shared_expert_intermediate_size": 8, "initializer_range": 0.3}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**moe, bos_token_id=None, eos_token_id=EOS, pad_token_id=None))
    model.save_pretrained(tmp_path)
    rows = examples_of("sft", 4) if method == "sft" else [pair(i, i + 1, 4 - i) for i in range(3)]
    transcripts = rows if method == "sft" else [*(p.chosen for p in rows), *(p.rejected for p in rows)]
    routers = []
    for row in transcripts:
        ids_1T = torch.from_numpy(row.token_ids[: row.action_ranges[-1].end].astype(np.int64))[None]
        routers.append(model(input_ids=ids_1T, output_router_logits=True).router_logits[0])
    balance = load_balancing_loss_func((torch.cat(routers),), 4, 2)
    (naive_loss(method, model, model, rows) + 0.5 * balance).backward()
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}

    folders = dict.fromkeys(("sft", "dpo", "reference"), str(tmp_path))
    [found] = one_rank.run(gradient, method, folders, rows, ["train.aux_loss_coef=0.5"])
    [(metrics, _, _)] = one_rank.run(iterations, method, folders, [rows], ["train.aux_loss_coef=0.5"])

    assert cases.largest_difference(found, expected) < 2e-6
    assert metrics[0]["train/aux_loss"] == pytest.approx(balance.item(), rel=1e-5)


def test_reward_model_refuses_a_balancing_loss(one_rank, models):
    [message] = one_rank.run(refusal, "reward_model", models, ["train.aux_loss_coef=0.01"])

    assert message.startswith("train.aux_loss_coef=0.01: reward models are trained without a balancing loss")


# --- iterations and evaluations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sft by rows", "reward model", "cdpo with likelihood"])
def test_metrics_are_exact_means_on_every_rank(two_ranks, models, by_hand, kind):
    """The loss by hand of all examples, before their step; the learning rate, the counts, the version."""
    method, of_kind = KINDS[kind]
    examples = examples_of(method)
    expected = by_hand("sft" if method == "sft" else kind)[0]

    first, second = two_ranks.run(iterations, method, models, [examples], [*of_kind, "train.micro_batch_size=3"])
    evaluations = two_ranks.run(evaluation, method, models, examples, [*of_kind, "train.micro_batch_size=1"])

    [metrics], digests, counters = first
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)
    assert {**metrics, "train/seconds": 0} == {**second[0][0], "train/seconds": 0}
    assert (digests, counters) == (second[1], (1, 1))
    assert (metrics["train/applied_steps"], metrics["train/skipped_steps"], metrics["train/lr"]) == (1, 0, 1e-3)
    assert metrics["train/examples"] == 8
    for measured, of_three, unchanged in evaluations:
        assert unchanged
        assert of_three["eval/examples"] == 3  # one rank repeats an example
        shared = {name.replace("train/", "eval/") for name in metrics} & measured.keys() - {"eval/seconds"}
        assert "eval/loss" in shared
        for name in shared:
            assert measured[name] == pytest.approx(metrics[name.replace("eval", "train")], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_dpo_starts_at_its_reference_in_bf16(one_rank, models, stage):
    same = {**models, "reference": models["dpo"]}
    settings = ["ds.param_dtype=bf16", f"ds.zero_stage={stage}", "train.micro_batch_size=3"]

    [(metrics, _, _)] = one_rank.run(evaluation, "dpo", same, examples_of("dpo"), settings)

    assert (metrics["eval/margin"], metrics["eval/chosen_reward"], metrics["eval/accuracy"]) == (0, 0, 0)
    assert metrics["eval/loss"] == pytest.approx(np.log(2))


def test_batch_without_trained_tokens_takes_no_step(one_rank, models):
    [(metrics, digests, counters)] = one_rank.run(iterations, "sft", models, [[sft_example(0, 0)]])

    assert digests[0] == digests[1]
    assert counters == (1, 0)
    assert metrics[0].keys() == {"train/applied_steps", "train/skipped_steps", "train/lr", "train/seconds"}


@pytest.fixture(scope="module")
def poisoned(models, tiny_model, tmp_path_factory):
    """The models, with NaN for one token that only a poisoned example has."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    folder, tied = tmp_path_factory.mktemp("poisoned"), str(tiny_model)
    policy = AutoModelForCausalLM.from_pretrained(tied, tie_word_embeddings=False)
    policy.lm_head.weight.data = policy.get_input_embeddings().weight.data.clone()
    classifier = AutoModelForSequenceClassification.from_pretrained(models["reward_model"])
    paths = {}
    for method, model in (("sft", policy), ("reward_model", classifier)):
        model.get_input_embeddings().weight.data[POISON] = torch.nan
        model.save_pretrained(folder / method)
        AutoTokenizer.from_pretrained(tied).save_pretrained(folder / method)
        paths[method] = str(folder / method)
    return {**paths, "dpo": paths["sft"], "reference": models["reference"]}


def with_poison(example):
    row = example if isinstance(example, SftExample) else example.rejected
    token_ids = row.token_ids.copy()
    token_ids[1] = POISON
    row = replace(row, token_ids=token_ids)
    return row if isinstance(example, SftExample) else replace(example, rejected=row)


@pytest.mark.parametrize(("method", "stage"), [("sft", 2), ("reward_model", 3), ("dpo", 3)])
def test_step_that_is_not_finite_is_skipped_and_the_next_is_normal_case_54(two_ranks, poisoned, method, stage):
    """An iteration of two steps of which the first is bad, then one of a good step."""
    examples = examples_of(method)
    bad = [with_poison(examples[0]), *examples[1:]]
    settings = [f"ds.zero_stage={stage}"]
    normal = two_ranks.run(iterations, method, poisoned, [examples, examples], settings)

    both = two_ranks.run(iterations, method, poisoned, [bad, examples, examples], settings)

    for (metrics, digests, counters), (expected, straight, _) in zip(both, normal, strict=True):
        assert [(m["train/applied_steps"], m["train/skipped_steps"]) for m in metrics] == [(0, 1), (1, 0), (1, 0)]
        assert digests == [straight[0], *straight]
        assert counters == (3, 2)
        assert "train/loss" not in metrics[0]
        assert [m["train/loss"] for m in metrics[1:]] == [m["train/loss"] for m in expected]
        assert all(np.isfinite(list(m.values())).all() for m in metrics)


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("sft", ["train.enable_ema=true"]),
        ("sft", [ZERO_3, "ds.param_dtype=bf16"]),
        ("reward_model", ["ds.zero_stage=0"]),
        ("dpo", [ZERO_3]),
    ],
)
def test_a_restored_run_goes_on_bit_for_bit_case_14(one_rank, models, tmp_path, method, overrides):
    examples = examples_of(method)
    batches = [examples[:4], examples[4:], examples[2:6], examples[1:8]]
    overrides = [*overrides, "model.lr_scheduler=linear", "train.micro_batch_size=2"]
    [(straight, digests, _)] = one_rank.run(iterations, method, models, batches, overrides)

    [(metrics, digest, counters)] = one_rank.run(two_and_two, method, models, batches, overrides, tmp_path)

    assert digest == digests[-1]
    assert counters == (4, 4)
    for name in ("train/loss", "train/lr", "train/grad_norm"):
        assert [m[name] for m in metrics] == [m[name] for m in straight[2:]]


def test_steps_of_an_iteration_are_taken_in_their_order(one_rank, models):
    examples = examples_of("sft")
    batches = [examples[:4], examples[4:]]
    [(apart, _, _)] = one_rank.run(iterations, "sft", models, batches)

    [(before, metrics, after)] = one_rank.run(learning, "sft", models, batches, examples, [])

    tokens = [m["train/tokens"] for m in apart]
    losses = [m["train/loss"] for m in apart]
    assert metrics["train/loss"] == pytest.approx(np.average(losses, weights=tokens))
    assert metrics["train/applied_steps"] == 2
    assert metrics["train/examples"] == 8
    assert after["eval/loss"] < before["eval/loss"]


# --- exports ---------------------------------------------------------------------------------------------------------


def test_exported_reward_model_gives_the_same_scores_in_hugging_faces_class(one_rank, models, tmp_path):
    """From a language model: a new head. Texts one by one, and as a batch padded by the exported tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pairs = examples_of("reward_model")
    tiny = {"reward_model": models["sft"]}

    [metrics] = one_rank.run(exported, "reward_model", tiny, pairs, pairs, tmp_path / "hf")

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.config.pad_token_id == tokenizer.pad_token_id == PAD
    chosen = [p.chosen.token_ids[: p.chosen.action_ranges[-1].end].tolist() for p in pairs]
    with torch.no_grad():
        batch = tokenizer.pad({"input_ids": chosen}, return_tensors="pt")
        together = model(**batch).logits[:, 0].tolist()
        for p, measured, in_batch in zip(pairs, metrics, together, strict=True):
            assert in_batch == pytest.approx(measured["eval/chosen_score"], abs=1e-5)
            assert naive_score(model, p.chosen).item() == pytest.approx(measured["eval/chosen_score"], abs=1e-5)
            assert naive_score(model, p.rejected).item() == pytest.approx(measured["eval/rejected_score"], abs=1e-5)
    assert max(together) - min(together) > 1e-3  # they differ


def test_answers_that_end_with_the_padding_token_are_scored_there_after_export_too(one_rank, models, tmp_path):
    from transformers import AutoModelForSequenceClassification

    pairs = [pair(i, i + 1, 4 - i, last=PAD) for i in range(4)]

    [metrics] = one_rank.run(exported, "reward_model", models, pairs, pairs[:1], tmp_path / "hf")

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert model.config.pad_token_id is None
    with torch.no_grad():
        assert naive_score(model, pairs[0].chosen).item() == pytest.approx(metrics[0]["eval/chosen_score"], abs=1e-5)


def test_exported_language_model_has_the_new_weights_and_the_average_its_own(one_rank, models, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = examples_of("sft")

    [[metrics]] = one_rank.run(
        exported, "sft", models, rows, [rows[5]], tmp_path / "hf", ["train.enable_ema=true", ZERO_3]
    )

    model, average, old = (
        AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "hf", tmp_path / "average", models["sft"])
    )
    with torch.no_grad():
        losses = [-naive_logprobs(m, rows[5]).mean().item() for m in (model, average, old)]
    assert losses[0] == pytest.approx(metrics["eval/loss"], abs=1e-5)
    assert metrics["eval/perplexity"] == pytest.approx(np.exp(losses[0]), rel=1e-5)
    assert losses[0] < losses[1] < losses[2]  # .992 of the average is the old model
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([72, 105]) == "Hi"


# --- learning --------------------------------------------------------------------------------------------------------


def task(method, models, steps, size=16):
    """Batches in the seeded order, and held-out examples."""
    kind = "sft" if method == "sft" else "pairs"
    settings = config(
        f"data.dataset={TASK}:{kind}?count=256",
        f"eval.dataset={TASK}:{kind}?count=64&split=test",
        f"train.batch_size={size}",
    )
    tokenizer = load_tokenizer(models["sft"])
    dataset = supervised_examples(settings, method, tokenizer)
    order, cursor, batches = dataset.order(settings.train.seed), PromptCursor(0, 0), []
    for _ in range(steps):
        indices, cursor = order.draw(cursor, size)
        batches.append([dataset[i] for i in indices])
    return batches, list(held_out_examples(settings, method, tokenizer))


def test_sft_learns_the_form_of_the_answers(one_rank, models):
    """36 characters and the end: log 36 = 3.6 is what the form is worth, log 320 = 5.8 the start."""
    [(before, _, after)] = one_rank.run(learning, "sft", models, *task("sft", models, 8), ["model.adam.lr=3e-3"])

    assert before["eval/loss"] > 5.5
    assert after["eval/loss"] < 3.8


def test_reward_model_is_right_about_held_out_pairs(one_rank, models):
    """It starts as the language model, with a new head."""
    tiny = {"reward_model": models["sft"]}

    [(before, _, after)] = one_rank.run(learning, "reward_model", tiny, *task("reward_model", models, 8), [])

    assert before["eval/accuracy"] < 0.7
    assert after["eval/accuracy"] > 0.9
    assert after["eval/chosen_score"] > after["eval/score_mean"] > after["eval/rejected_score"]
    assert after["eval/score_std"] > 0.5


def test_dpo_comes_to_prefer_the_chosen_answers(one_rank, models):
    same = {**models, "reference": models["dpo"]}

    [(before, _, after)] = one_rank.run(learning, "dpo", same, *task("dpo", models, 6), [])

    assert before["eval/accuracy"] == 0  # ties alone
    assert after["eval/accuracy"] > 0.9
    assert after["eval/margin"] == pytest.approx(after["eval/chosen_reward"] - after["eval/rejected_reward"])
    assert after["eval/margin"] > 0.1
