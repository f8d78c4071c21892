"""The agent that plays the environments of ``env:`` datasets, and the processes that it lives in."""

import pytest

from rlhf_core.agents.entries import environments
from rlhf_core.agents.environment.instance import Instance
from rlhf_core.agents.environment.pool import EnvironmentPool
from rlhf_core.agents.environment.rows import EnvironmentAgent, environment_argument
from rlhf_core.config import load_config
from rlhf_core.data.environment_rows import read_environments
from rlhf_core.errors import AgentError, ConfigError

pytestmark = pytest.mark.agents

LAKE = "env:gymnasium/FrozenLake-v1?is_slippery=false&size=1&invalid_reward=-0.5"


def row_of(spec):
    return next(iter(read_environments(spec))).values


def begun(spec, messages=None, **label):
    row = row_of(spec)
    agent = Instance(EnvironmentAgent, {})
    agent.reset({"label": row["label"] | label, "messages": messages})
    return agent


def stepped(agent, text):
    return agent.step({"action_text": text, "sampling_params": {"max_tokens": 16}})


def test_an_episode_from_its_label():
    agent = begun(LAKE)

    wrong = stepped(agent, "hm")
    walked = [stepped(agent, action) for action in ("down", "down", "right", "right", "down", "right")]
    agent.close({})

    assert (wrong["reward"], wrong["score"], wrong["done"]) == (-0.5, 0.0, False)
    assert wrong["feedback"].startswith("\nThat names no action.")
    assert wrong["feedback"].endswith("\n")
    last = walked[-1]
    assert (last["reward"], last["score"], last["done"]) == (1.0, 1.0, True)
    assert last["logs"] == {"success": 1.0, "invalid_actions": 1.0}


def test_feedback_is_a_message_where_the_prompt_is_a_chat():
    agent = begun(LAKE, messages=[{"role": "user", "content": "..."}])

    feedback = stepped(agent, "right")["feedback"]

    assert [message["role"] for message in feedback] == ["user"]
    assert "S [F] F  F" in feedback[0]["content"]


def test_a_picture_comes_with_the_message():
    agent = begun(f"{LAKE}&render=rgb_array", messages=[])

    said = stepped(agent, "right")

    assert [part["type"] for part in said["feedback"][0]["content"]] == ["image", "text"]
    assert said["images"][0].startswith(b"\x89PNG")


def test_a_picture_needs_a_chat_template():
    agent = begun(f"{LAKE}&render=rgb_array")

    with pytest.raises(AgentError, match=r"data\.apply_chat_template=true"):
        stepped(agent, "right")


def test_an_environment_that_begins_otherwise_than_its_prompt_is_refused():
    with pytest.raises(AgentError, match="begins otherwise than when its prompt was made"):
        begun(LAKE, observation_sha256="0" * 16)


def test_what_the_processes_are_told():
    config = load_config(
        "configs/environments_tiny_cpu.yaml", ["eval.dataset=env:gymnasium/Taxi-v4?size=2,env:gymnasium/Blackjack-v1"]
    )

    assert environment_argument(config) == {"collections": ["gymnasium", "reasoning_gym", "textarena"]}


def test_a_collection_that_is_not_there_stops_the_start():
    with pytest.raises(ConfigError, match="did you mean gymnasium"):
        environments({"collections": ["gymnasum"]})


async def test_every_collection_plays_in_a_process_forked_for_the_episode():
    """Whatever they import is imported once, and leaves no thread that would forbid to fork."""
    specs = (
        LAKE,
        "env:textarena/GuessTheNumber-v0?size=1",
        "env:reasoning_gym/chain_sum?size=1&attempts=2",
    )
    argument = {"collections": ["gymnasium", "reasoning_gym", "textarena"]}
    pool = EnvironmentPool(
        "rlhf_core.agents.entries:environments", argument, max_processes=3, step_timeout=60, name="environments"
    )
    await pool.start()
    try:
        for spec in specs:
            async with pool.open(7) as environment:
                await environment.call("reset", {"label": row_of(spec)["label"], "messages": None})
                said = await environment.call("step", {"action_text": "nothing", "sampling_params": {"max_tokens": 16}})
            assert (said["done"], said["score"]) == (False, 0.0)
    finally:
        await pool.close()
