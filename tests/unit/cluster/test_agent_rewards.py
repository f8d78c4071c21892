"""An agent rewards by itself, or leaves it to the reward section; what nobody rewards is no zero."""

from types import SimpleNamespace

import pytest
from cluster_samples import failed, row

from rlhf_core.cluster.scoring_worker import ScoringWorker
from rlhf_core.config import parse_config
from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards import reward_request

pytestmark = pytest.mark.agents

AGENT = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "train": {"agent_func_path": "agent.py"},
}


class Source:
    """Gives every sample the same reward."""

    async def score(self, requests):
        self.requests = requests
        return [RewardResult(RewardStatus.OK, 3.0, 3.0) for _ in requests]


def scoring(**sections):
    context = SimpleNamespace(enter=lambda worker: None, config=parse_config(AGENT | sections), store=None)
    return ScoringWorker(context)


async def results(worker, *rows):
    scored, _ = await worker._score(rows, None)
    return [entry.result for entry in scored]


async def test_without_a_source_a_missing_reward_is_an_error_of_its_sample():
    own, none, broken = await results(scoring(), row(sample=0, reward=1.5), row(sample=1), failed(sample=2))

    assert (own.status, own.reward) == (RewardStatus.OK, 1.5)
    assert (none.status, none.reward) == (RewardStatus.ERROR, None)
    assert "the agent gave no reward" in none.error
    assert broken.status is RewardStatus.SKIPPED


async def test_a_run_whose_agent_rewards_starts_no_source():
    worker = scoring()

    await worker.start([], None)

    assert worker._source is None


async def test_the_agents_score_stays_where_the_source_rewards():
    worker = scoring()
    worker._source = Source()

    scored, plain = await results(worker, row(sample=0, score=1.0), row(sample=1))

    assert (scored.reward, scored.score) == (3.0, 1.0)
    assert (plain.reward, plain.score) == (3.0, 3.0)


async def test_reward_functions_see_all_turns_and_the_last_answer():
    request = reward_request(row(answer=2, transcript="A<|im_end|>\nno\n2"))

    assert (request.query, request.answer) == ("1 + 1 =A<|im_end|>\nno\n2", "2")
