"""PPO's critic on real ranks, compared with Hugging Face's own class on one unpadded row at a time; and a policy that waits
for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import training_cases as cases

pytestmark = pytest.mark.pipeline

ZERO_2, ZERO_3 = "ds.zero_stage=2", "ds.zero_stage=3"
BF16 = "ds.param_dtype=bf16"
CLIP = 0.5


@pytest.fixture(scope="module")
def policy(tiny_model):
    return str(tiny_model)


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """A reward model with the policy's backbone: a critic that starts from one has its head."""
    from transformers import AutoTokenizer

    from rlhf_core.training.value_model import load_sequence_model

    folder = tmp_path_factory.mktemp("critic")
    load_sequence_model(cases.config(), str(tiny_model), seed=5).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


def valued(rows, seed=0):
    """The rows with values of before and returns that nothing relates."""
    rng = np.random.default_rng(seed)

    def on_actions(row):
        numbers_T = np.zeros(len(row.token_ids), np.float32)
        for start, end in row.action_ranges:
            numbers_T[start:end] = rng.standard_normal(end - start)
        return numbers_T

    return [replace(row, values=on_actions(row), returns=on_actions(row)) for row in rows]


@pytest.fixture(scope="module")
def rows():
    return valued(cases.experiences())


def hugging_face(model):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)


def naive_values(hf, row, extra=0):
    """The head on the hidden states before each action, and before the token after the last one with ``extra=1``."""
    hidden_TH = hf.base_model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None]).last_hidden_state[0]
    [(start, end)] = row.action_ranges
    return hf.score(hidden_TH[start - 1 : end - 1 + extra]).squeeze(1)


def naive_gradient(model, rows):
    """By hand: half the larger of the free and the clipped squared error, a mean over the action tokens of all rows."""
    hf, losses = hugging_face(model), []
    for row in rows:
        [(start, end)] = row.action_ranges
        old, target = torch.from_numpy(row.values[start:end]), torch.from_numpy(row.returns[start:end])
        values = naive_values(hf, row)
        near = torch.minimum(torch.maximum(values, old - CLIP), old + CLIP)
        losses.append(0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2))
    torch.cat(losses).mean().backward()
    return {name: parameter.grad.numpy() for name, parameter in hf.named_parameters()}


def relative_difference(found, expected):
    return cases.largest_difference(found, expected) / max(np.abs(g).max() for g in expected.values())


# --- what the ranks run


def make_critic(rank, model, overrides=()):
    from rlhf_core.training.critic import CriticTrainer

    settings = [
        "algo.advantage.estimator=gae",
        f"critic.num_gpus_per_node={rank.world_size}",
        f"critic.value_clip={CLIP}",
    ]
    settings += [
        "critic.adam.lr=1e-3",
        "critic.lr_scheduler=constant",
        "critic.lr_warmup_ratio=0",
        "critic.max_norm=1e9",
    ]
    return CriticTrainer(cases.config(*settings, *overrides), model, rank, total_steps=100)


def values(rank, model, rows, overrides=(), bootstrap=False):
    return make_critic(rank, model, overrides).values(rows, bootstrap)


def gradient(rank, model, rows, overrides=()):
    """Of the one optimizer step of an update, before the optimizer sees it."""
    from deepspeed.utils import safe_get_full_grad

    trainer, seen = make_critic(rank, model, overrides), {}

    def look():
        seen.update((n, safe_get_full_grad(p).cpu().numpy().copy()) for n, p in trainer.hf_model.named_parameters())
        return 1.0

    trainer.apply = look
    trainer.update(rows, iteration=0)
    return seen


def updates(rank, model, batches, overrides=(), folder=None):
    """One update a batch; with ``folder`` the second half by another trainer that loads what the first one saved."""
    trainer, half, reports, digests = make_critic(rank, model, overrides), len(batches) // 2, [], []
    digests.append(trainer.weight_digest())
    for iteration, rows in enumerate(batches):
        if folder is not None and iteration == half:
            trainer.save(folder)
            trainer = make_critic(rank, model, overrides)
            trainer.load(folder)
        reports.append(trainer.update(rows, iteration))
        digests.append(trainer.weight_digest())
    return reports, digests, (trainer.version, trainer.optimizer_steps)


def exported(rank, model, rows, folder):
    trainer = make_critic(rank, model, [ZERO_3])
    trainer.update(rows, 0)
    trainer.export_hf(folder)
    return trainer.values(rows)


def waits(rank, model, rows, frozen_updates, overrides):
    """A policy that is frozen for some updates, then trained once: reports, digests, version and steps."""
    settings = ["actor.lr_warmup_ratio=0.5", "actor.lr_scheduler=linear", "actor.adam.lr=1e-3", *overrides]
    trainer = cases.make_trainer(rank, model, settings, total_steps=4)
    digests, reports = [trainer.weight_digest()], []
    for iteration in range(frozen_updates + 2):
        reports.append(trainer.update(rows, iteration=7, frozen=iteration < frozen_updates))
        digests.append(trainer.weight_digest())
    return reports, digests, (trainer.version, trainer.optimizer_steps)


# --- values


@pytest.mark.parametrize("overrides", [(ZERO_2,), (ZERO_3,), (ZERO_3, "ds.packing_samples=true")])
def test_values_are_those_of_a_naive_forward_pass(one_rank, model, overrides):
    """Padding or none, several lengths, and a row without actions."""
    hf, rows = hugging_face(model), [cases.experience(i, n) for i, n in enumerate([1, 9, 4])]

    [scored] = one_rank.run(values, model, [*rows, cases.experience(3, 0)], [*overrides, "rollout.micro_batch_size=3"])

    for i, row in enumerate(rows):
        [(start, end)] = row.action_ranges
        np.testing.assert_allclose(scored[i][start:end], naive_values(hf, row).detach(), atol=1e-5)
        assert (len(scored[i]), scored[i][:start].any()) == (end, False)
    assert scored[3].tolist() == [0, 0, 0]


def test_the_value_after_the_last_action_may_be_asked_for_too(one_rank, model):
    hf, rows = hugging_face(model), [cases.experience(i, n) for i, n in enumerate([1, 9, 4])]

    [scored] = one_rank.run(values, model, rows, ["rollout.micro_batch_size=2"], bootstrap=True)

    for i, row in enumerate(rows):
        [(start, end)] = row.action_ranges
        assert len(scored[i]) == end + 1
        np.testing.assert_allclose(scored[i][start:], naive_values(hf, row, extra=1).detach(), atol=1e-5)


def test_shares_of_the_ranks_are_all_rows_once(two_ranks, model):
    rows = [*cases.experiences(lengths=[5, 2]), cases.experience(2, 0, prompt=9)]

    first, second = two_ranks.run(values, model, rows, [ZERO_3, "rollout.micro_batch_size=1"])

    assert sorted([*first, *second]) == [0, 1, 2]


# --- learning


@pytest.mark.parametrize(("stage", "size"), [(ZERO_2, 1), (ZERO_2, 2), (ZERO_2, 8), (ZERO_3, 2)])
def test_gradient_does_not_depend_on_micro_batches_case_55(one_rank, model, rows, stage, size):
    [found] = one_rank.run(gradient, model, rows, [stage, f"train.micro_batch_size={size}"])

    assert relative_difference(found, naive_gradient(model, rows)) < 1e-6


@pytest.mark.parametrize("stage", [ZERO_2, ZERO_3])
@pytest.mark.parametrize(("count", "size", "packs"), [(8, 4, False), (3, 1, False), (8, 3, True)])
def test_gradient_does_not_depend_on_the_number_of_ranks_case_47_and_55(
    two_ranks, model, rows, stage, count, size, packs
):
    """Of three rows one rank has one, and repeats it."""
    settings = [stage, f"train.micro_batch_size={size}", f"ds.packing_samples={packs}"]

    both = two_ranks.run(gradient, model, rows[:count], settings)

    expected = naive_gradient(model, rows[:count])
    assert all(relative_difference(found, expected) < 1e-6 for found in both)


def test_an_update_says_what_the_critic_knew(one_rank, model, rows):
    """Of one step over all rows: the values of its forward pass are those of before the update."""
    hf = hugging_face(model)
    spoken = [np.s_[row.action_ranges[0].start : row.action_ranges[0].end] for row in rows]
    said = torch.cat([naive_values(hf, row) for row in rows]).detach().numpy()
    old, target = (
        np.concatenate([getattr(row, name)[of] for row, of in zip(rows, spoken, strict=True)])
        for name in ("values", "returns")
    )
    near = np.clip(said, old - CLIP, old + CLIP)

    [([report], digests, counts)] = one_rank.run(updates, model, [rows])

    assert report["value_mean"] == pytest.approx(said.mean(), abs=1e-5)
    assert report["return_mean"] == pytest.approx(target.mean(), abs=1e-5)
    assert report["clip_fraction"] == pytest.approx(((near - target) ** 2 > (said - target) ** 2).mean())
    assert report["explained_variance"] == pytest.approx(1 - (target - old).var() / target.var(), abs=1e-5)
    assert report["loss"] == pytest.approx(np.maximum((near - target) ** 2, (said - target) ** 2).mean() / 2, abs=1e-5)
    assert report["grad_norm"] == pytest.approx(
        np.sqrt(sum((g**2).sum() for g in naive_gradient(model, rows).values())), rel=1e-4
    )
    assert digests[0] != digests[1]
    assert (report["lr"], report["applied_steps"], counts) == (1e-3, 1, (1, 1))


@pytest.mark.parametrize("overrides", [(), (BF16,)])
def test_values_come_near_their_returns(one_rank, model, rows, overrides):
    [(reports, _, _)] = one_rank.run(updates, model, [rows] * 6, overrides)

    assert reports[-1]["loss"] < 0.8 * reports[0]["loss"]


def test_a_critic_that_starts_from_the_policy_says_nothing_at_first(one_rank, policy, rows):
    """Its head is zero, so its first step is the head's alone."""
    [scored] = one_rank.run(values, policy, rows)
    [first] = one_rank.run(gradient, policy, rows)

    [(reports, _, _)] = one_rank.run(updates, policy, [rows] * 6)

    assert not any(of_row.any() for of_row in scored.values())
    assert {name for name, of_weight in first.items() if of_weight.any()} == {"score.weight"}
    assert reports[-1]["loss"] < 0.95 * reports[0]["loss"]


def test_every_rank_reports_the_same_numbers(two_ranks, model, rows):
    (first, first_digests, _), (second, second_digests, _) = two_ranks.run(updates, model, [rows], [ZERO_3])

    own = {"seconds": 0, "memory_gib": 0}
    assert first[0] | own == second[0] | own
    assert first_digests == second_digests


@pytest.mark.parametrize("overrides", [(ZERO_2,), (ZERO_3,), (ZERO_2, BF16)])
def test_a_restored_critic_goes_on_bit_for_bit_case_14(one_rank, model, tmp_path, overrides):
    batches = [valued(cases.experiences(seed=seed), seed) for seed in range(4)]
    overrides = (*overrides, "critic.lr_scheduler=linear", "train.batch_size=4")
    [(straight, digests, _)] = one_rank.run(updates, model, batches, overrides)

    [(reports, again, counts)] = one_rank.run(updates, model, batches, overrides, folder=tmp_path)

    assert again == digests
    assert [r["loss"] for r in reports] == [r["loss"] for r in straight]
    assert counts == (4, 8)


def test_two_ranks_restore_their_parts_case_14(two_ranks, model, rows, tmp_path):
    straight = two_ranks.run(updates, model, [rows] * 2, [ZERO_3])

    resumed = two_ranks.run(updates, model, [rows] * 2, [ZERO_3], folder=tmp_path)

    assert [digests for _, digests, _ in resumed] == [digests for _, digests, _ in straight]


def saved(rank, model, rows, overrides, folder):
    """The digest of what is saved, and the values one update later."""
    trainer = make_critic(rank, model, overrides)
    trainer.update(rows, iteration=0)
    trainer.save(folder)
    return trainer.weight_digest(), later_values(trainer, rows)


def loaded(rank, model, rows, overrides, folder):
    trainer = make_critic(rank, model, overrides)
    trainer.load(folder)
    return trainer.weight_digest(), later_values(trainer, rows)


def later_values(trainer, rows):
    trainer.update(rows, iteration=1)
    return trainer.values(rows)


def test_a_critic_of_two_sharded_ranks_goes_on_as_one(one_rank, two_ranks, model, rows, tmp_path):
    """Its head has one row: a part of it on each rank."""
    universal = "ds.use_universal_ckpt=true"

    (digest, first), (_, second) = two_ranks.run(saved, model, rows, [ZERO_3, universal], tmp_path)
    [(again, values_of)] = one_rank.run(loaded, model, rows, ["ds.zero_stage=0", universal], tmp_path)

    assert again == digest
    for index, expected in {**first, **second}.items():
        np.testing.assert_allclose(values_of[index], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("poison", ["returns", "values"])
def test_step_that_is_not_finite_is_skipped_case_54(one_rank, model, rows, poison):
    """A NaN that the rows show; a return that is finite itself but makes an infinite loss."""
    bad = np.full_like(rows[3].returns, np.nan if poison == "values" else 3e38)
    batches = [[*rows[:3], replace(rows[3], **{poison: bad}), *rows[4:]], rows]
    [(_, normal, _)] = one_rank.run(updates, model, [rows])

    [(reports, digests, counts)] = one_rank.run(updates, model, batches)

    assert [(r["applied_steps"], r["skipped_steps"]) for r in reports] == [(0, 1), (1, 0)]
    assert digests == [normal[0], *normal]
    assert counts == (2, 1)


def refused(rank, model, rows):
    from rlhf_core.errors import TrainingError

    try:
        make_critic(rank, model).update(rows, 0)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it was trained on")


def test_experience_of_a_run_without_a_critic_is_refused(one_rank, model):
    [message] = one_rank.run(refused, model, cases.experiences())

    assert "made by a run without a critic" in message


def test_export_is_a_reward_model_of_hugging_face(one_rank, model, rows, tmp_path):
    from transformers import AutoTokenizer

    [scored] = one_rank.run(exported, model, rows, tmp_path)

    hf = hugging_face(tmp_path)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(scored[i][row.action_ranges[0].start :], naive_values(hf, row).detach(), atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).decode([72, 105]) == "Hi"


# --- a policy that waits for its critic (critic.freezing_steps)


@pytest.mark.parametrize("overrides", [(ZERO_2,), (ZERO_3, BF16)])
def test_a_frozen_policy_changes_nothing_but_its_version(one_rank, policy, overrides):
    """The warm-up, the schedule and the first step are those of a policy that was never frozen."""
    rows = cases.experiences()
    [(straight, normal, _)] = one_rank.run(waits, policy, rows, 0, overrides)

    [(reports, digests, counts)] = one_rank.run(waits, policy, rows, 2, overrides)

    assert digests == [normal[0]] * 2 + normal
    assert [r.lr for r in reports[2:]] == [r.lr for r in straight] == [0, 5e-4]
    assert [(r.applied_steps, r.num_tokens) for r in reports[:2]] == [(0, 0)] * 2
    assert counts == (4, 2)
