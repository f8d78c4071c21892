"""PPO with its critic, on real parts: three iterations of 4 prompts × 4 samples, two optimizer steps each.

run        what it is for
calm       what such a run leaves behind
disturbed  its critic and its policy are killed in the middle, and nothing is saved before its end: the same, bit for bit
"""

import numpy as np
import pytest
import torch
from victims import disturbed

from flows.train import train
from rlhf_core.records import Stage, action_mask
from rlhf_core.storage import CheckpointStore, RunStore

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

CONFIG = "configs/ppo_tiny_cpu.yaml"
ITERATIONS = 3
LAMBDA = 0.95
SMALL = [
    f"train.max_iterations={ITERATIONS}",
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=16",
    "train.batch_size=8",
    "train.enable_ema=true",
    f"algo.advantage.lambd={LAMBDA}",
    "critic.freezing_steps=1",
    "eval.dataset=[]",
    "run.cpu_threads=1",
    "run.max_restarts=3",
]
VICTIMS = [
    (1, Stage.EXPERIENCE, "ray::CriticWorker"),  # about to learn, or learning
    (1, Stage.UPDATE, "ray::PolicyWorker"),
]


@pytest.fixture(scope="module")
async def calm(prefect_api, ray_cluster, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("calm"))
    await train(CONFIG, [*SMALL, "ckpt.save_steps=1", f"storage.root={root}"], "calm")
    return RunStore("calm", root)


def bodies(store, stage):
    return [store.stage(k, stage)[0].body for k in range(ITERATIONS)]


def experience(store, iteration):
    return store.read_experience(store.stage(iteration, Stage.EXPERIENCE)[0].parts)


def exported(store, version, folder, prefix):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    found = CheckpointStore(store).open_folder(version, folder / f"{version}", prefix=prefix)
    return (AutoModelForSequenceClassification if "critic" in prefix else AutoModelForCausalLM).from_pretrained(found)


def gae(row):
    """(advantages, returns) of the action tokens, by the definition: the reward at the last one, gamma 1."""
    values = row.values[action_mask(row.action_ranges, len(row.token_ids))].astype(np.float64)
    rewards = np.zeros(len(values))
    rewards[-1] = row.shaped_reward
    advantages, following = np.zeros(len(values)), 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + (values[t + 1] if t + 1 < len(values) else 0.0) - values[t]
        advantages[t] = following = delta + LAMBDA * following
    return advantages, advantages + values


async def test_advantages_and_returns_are_those_of_the_recorded_rewards_and_values(calm) -> None:
    for k in range(ITERATIONS):
        rows = experience(calm, k)
        raw, returns = (np.concatenate(parts) for parts in zip(*(gae(row) for row in rows), strict=True))
        spoken = [action_mask(row.action_ranges, len(row.token_ids)) for row in rows]

        stored, targets = (
            np.concatenate([getattr(row, name)[mask] for row, mask in zip(rows, spoken, strict=True)])
            for name in ("advantages", "returns")
        )

        assert len(rows) == 16
        np.testing.assert_allclose(targets, returns, atol=1e-5)
        np.testing.assert_allclose(stored, (raw - raw.mean()) / raw.std(), atol=1e-4)


async def test_the_recorded_values_are_those_of_the_critic_of_that_version(calm, tmp_path) -> None:
    critic = exported(calm, 2, tmp_path, "critic/hf").eval()

    for row in experience(calm, 2)[:4]:
        with torch.no_grad():
            hidden_TH = critic.base_model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None])[0][0]
            values_T = critic.score(hidden_TH).squeeze(1).numpy()
        (start, end) = row.action_ranges[0]
        np.testing.assert_allclose(row.values[start:end], values_T[start - 1 : end - 1], atol=1e-4)
        assert not row.values[:start].any()


async def test_the_policy_waits_for_its_critic(calm, tmp_path) -> None:
    """``critic.freezing_steps=1``: version 1 of the policy is the model that the run began with, bit for bit."""
    from transformers import AutoModelForCausalLM

    began = dict(AutoModelForCausalLM.from_pretrained(tiny(tmp_path)).named_parameters())
    first, second = (dict(exported(calm, version, tmp_path, "hf").named_parameters()) for version in (1, 2))

    assert all(torch.equal(weight, first[name]) for name, weight in began.items())
    assert any(not torch.equal(weight, second[name]) for name, weight in began.items())
    assert [body["optimizer_steps"] for body in bodies(calm, Stage.UPDATE)] == [0, 2, 4]
    assert calm.read_run()["plan"] | {"total_steps": 4, "critic_steps": 6} == calm.read_run()["plan"]


def tiny(folder):
    from rlhf_core.data.tiny_model import make_tiny_model

    return make_tiny_model(folder / "tiny", seed=0)


async def test_every_update_says_what_the_critic_did(calm) -> None:
    updates = bodies(calm, Stage.UPDATE)

    assert len({body["critic_digest"] for body in updates}) == ITERATIONS
    for body in updates:
        metrics = body["metrics"]
        assert (metrics["critic/applied_steps"], metrics["critic/skipped_steps"]) == (2, 0)
        assert metrics["critic/explained_variance"] <= 1
        assert min(metrics[f"critic/{name}"] for name in ("loss", "grad_norm", "lr", "seconds", "memory_gib")) > 0
    assert [body["metrics"]["update/applied_steps"] for body in updates] == [0, 2, 2]


async def test_a_checkpoint_holds_both_models_and_the_average(calm, tmp_path) -> None:
    body, files = CheckpointStore(calm).newest()[1], {entry.path for entry in CheckpointStore(calm).files(3)}

    assert body["critic_digest"] == bodies(calm, Stage.UPDATE)[-1]["critic_digest"]
    assert {f"{folder}/model.safetensors" for folder in ("hf", "hf_ema", "critic/hf")} <= files
    assert {"state/trainer.json", "state/ema_rank0.pt", "critic/state/trainer.json"} <= files
    average, policy = (dict(exported(calm, 3, tmp_path / p, p).named_parameters()) for p in ("hf_ema", "hf"))
    assert any(not torch.equal(weight, policy[name]) for name, weight in average.items())


@pytest.mark.examples
async def test_a_dead_critic_is_made_again_and_changes_nothing(calm, tmp_path) -> None:
    """From the recorded updates alone: the policy's first one changes nothing then, too."""
    store = RunStore("disturbed", str(tmp_path))
    run = train(CONFIG, [*SMALL, "ckpt.save_steps=-1", f"storage.root={tmp_path}"], "disturbed")

    await disturbed(run, store, VICTIMS)

    for key in ("digest", "critic_digest", "optimizer_steps"):
        assert [body[key] for body in bodies(store, Stage.UPDATE)] == [body[key] for body in bodies(calm, Stage.UPDATE)]
    for k in range(ITERATIONS):
        for one, other in zip(experience(store, k), experience(calm, k), strict=True):
            assert np.array_equal(one.values, other.values)
