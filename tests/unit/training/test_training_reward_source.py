"""A reward model of this process scores saved trajectories."""

import pytest
import torch
from saved_run import save_run
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rlhf_core.cluster.rescoring import local_model, plan_rescoring
from rlhf_core.errors import TrainingError
from rlhf_core.rewards import make_reward_source
from rlhf_core.rewards.rescore import rescore_iteration
from rlhf_core.storage.rescored import Rescoring

RUN = [[("g0", [("12", 1.0), ("größe", 0.0)])]]


@pytest.fixture
def store(tmp_path):
    return save_run(tmp_path / "runs", RUN, config={"ds": {"param_dtype": "fp32"}})


@pytest.fixture(autouse=True)
def policy(monkeypatch, tmp_path, tiny_model):
    """builtin:tiny, as the run records its policy, is the session's."""
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "tiny-1-seed0").symlink_to(tiny_model)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))


@pytest.fixture
def classifier(tmp_path, tiny_model):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1, pad_token_id=259)).eval()
    model.save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(str(tiny_model)).save_pretrained(tmp_path / "reward")
    return model


async def test_it_scores_the_tokens_that_were_sampled(store, classifier, tmp_path):
    plan = plan_rescoring(store.url, [str(tmp_path / "reward")])
    rescoring = Rescoring(store, plan.name)
    rescoring.begin(plan.scorer)
    source = make_reward_source(plan.config.reward, local_model(plan))

    await rescore_iteration(rescoring, 0, source)
    await source.close()

    rows = store.read_trajectories(store.parts_in("iterations/00000000/rollout"))
    for row, scored in zip(rows, rescoring.rewards(0), strict=True):
        with torch.no_grad():
            expected = float(classifier(torch.tensor([row.token_ids.tolist()])).logits[0, 0])
        assert scored.result.reward == pytest.approx(expected, abs=1e-4)


def test_a_policy_is_no_reward_model(store, tiny_model):
    plan = plan_rescoring(store.url, [str(tiny_model)])

    with pytest.raises(TrainingError, match="lacks weights of a reward model"):
        local_model(plan)
