"""What the episodes of a rollout may use and are bounded by, where an agent plays them."""

from types import SimpleNamespace

import pytest
from minimal_config import config

from rlhf_core.agents import TurnLimits
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.records import Prompt, SamplingParams

pytestmark = pytest.mark.agents

AGENT = "train.agent_func_path=a.py"


def groups(*overrides, iteration=3, prompts=2, samples=3):
    checked = config(AGENT, *overrides)
    worker = RolloutWorker(SimpleNamespace(run_id="run", config=checked, store=None, enter=lambda worker: None))
    worker._tokenizer = worker._images = None
    worker._end_ids = frozenset({2})
    drawn = [(f"g{i}", Prompt(f"row-{i}", "sums", "1 =", [1])) for i in range(prompts)]
    return worker.episodes(iteration, drawn, samples, SamplingParams(8), generate=None)


def test_the_samples_of_a_prompt_are_played_in_one_environment_with_answers_of_their_own():
    first, second = ([episode.environment_seed for episode in group] for group in groups())
    seeds = [episode.sampling.seed for group in groups() for episode in group]

    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert len({*seeds, *first, *second}) == 6 + 2


def test_environments_are_the_same_in_a_resumed_iteration_and_others_in_the_next():
    seeds = [[group[0].environment_seed for group in groups(iteration=iteration)] for iteration in (3, 3, 4)]

    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2])


def test_limits_are_those_of_the_configuration():
    episode = groups("agent.max_turns=5", "agent.max_turn_tokens=6", "data.max_len=2048")[0][0]

    assert (episode.limits, episode.max_len, episode.end_ids) == (TurnLimits(5, 6), 2048, frozenset({2}))


def test_a_turn_may_use_up_all_tokens_unless_it_is_told_otherwise():
    assert groups("rollout.max_new_tokens=99")[0][0].limits.max_turn_tokens == 99
