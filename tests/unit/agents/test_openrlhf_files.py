"""Agent files in OpenRLHF's style, unchanged but for the import line, in processes of their own."""

from pathlib import Path

import pytest
from agent_script import numbers
from turn_script import Speaks, actions_of, ids, plain, play_executor, tokenizer, turns_episode

from rlhf_core.agents import AgentExecutorBase
from rlhf_core.agents.finding import AgentKind, find_agent
from rlhf_core.agents.loading import load_agent
from rlhf_core.config import parse_config
from rlhf_core.errors import AgentError, ConfigError
from rlhf_core.records import StepReward, StopReason

pytestmark = pytest.mark.agents

DATA = Path(__file__).parents[2] / "data"


def config_of(file, **agent):
    return parse_config(
        {
            "actor": {"model_name_or_path": "builtin:tiny"},
            "data": {"prompt_dataset": "p.jsonl"},
            "train": {"agent_func_path": str(file)},
            "agent": {"max_processes": 2, **agent},
        }
    )


@pytest.fixture(scope="module")
async def load(tmp_path_factory):
    """Load an agent file, each once."""
    loaded, folder = {}, str(tmp_path_factory.mktemp("tokenizer"))
    tokenizer().save_pretrained(folder)

    async def get(name):
        if name not in loaded:
            options = {"name": folder, "trust_remote_code": False, "use_fast": True}
            loaded[name] = await load_agent(config_of(DATA / name), options)
        return loaded[name]

    yield get
    for agent in loaded.values():
        await agent.close()


async def test_an_agent_instance(load):
    """Its ``__init__`` is async, its rewards are tensors, and ``AgentExecutor`` takes no arguments."""
    agent = await load("openrlhf_agent.py")

    [row] = await agent.executor.execute(turns_episode(Speaks("x7", "no"), plain("ab"), environment_seed=5))
    [again] = await agent.executor.execute(turns_episode(Speaks("x7", "no"), plain("ab"), environment_seed=5))

    feedback = "\n\nHuman: [INCORRECT]\n2\n\nAssistant: "
    assert row.token_ids.tolist() == [256, *ids("ab"), *ids("x7"), *ids(feedback), *ids("no")]
    assert row.step_rewards == (StepReward(4, 1.0), StepReward(len(row.token_ids) - 1, 0.25))
    assert (row.reward, row.score, row.stop_reason) == (1.25, 0.25, StopReason.DONE)
    assert row.metrics["agent/dummy_scores"] == 0.25
    assert row.metrics["agent/luck"] == again.metrics["agent/luck"]


async def test_an_executor_with_a_loop_of_its_own(load):
    agent = await load("openrlhf_executor.py")

    [row] = await agent.executor.execute(turns_episode(Speaks("xyz", "no", version=4), plain("ab")))

    assert row.token_ids.tolist() == ids("abxyz\n3?no")
    assert row.action_ranges == ((2, 5), (8, 10))
    assert numbers(row.rollout_logprobs) == [0, 0, -1, -2, -3, 0, 0, 0, -4, -5]
    assert row.version_spans == ((2, 5, 4), (8, 10, 4))
    assert (row.reward, row.score, row.stop_reason, row.answer) == (10.0, 0.5, StopReason.DONE, "no")
    assert row.metrics == {"agent/turns": 2.0, "agent/turns_seen": 2.0, "agent/dropped_logs": 0.0}
    assert row.transcript == "xyz\n3?no"


async def test_an_executor_of_an_older_version_that_goes_on_with_super():
    found = find_agent(str(DATA / "openrlhf_older_agent.py"))

    [row] = await play_executor(Speaks("A", "B"), found.what, plain("ab"))

    assert found.kind is AgentKind.EXECUTOR

    assert row.token_ids.tolist() == [256, *ids("abA\nagain: B")]
    assert (row.reward, row.score) == (11.0, 0.5)


async def test_an_executor_that_is_cut_off_is_truncated(load):
    agent = await load("openrlhf_executor.py")

    [row] = await agent.executor.execute(turns_episode(Speaks("xyz", "yyyy"), plain("ab"), total=5))

    assert (row.stop_reason, actions_of(row)[1]) == (StopReason.LENGTH, ids("yy"))


async def test_a_failing_executor_is_a_failure_of_its_sample(load):
    """The budget of all turns ends with its first turn."""
    agent = await load("openrlhf_executor.py")

    with pytest.raises(AgentError, match=r"rollout\.max_new_tokens is reached: end the episode where finish_reason"):
        await agent.executor.execute(turns_episode(Speaks("xyz", "yyyy"), plain("ab"), total=3))


# --- what contradicts the engine


def returns(change):
    class Changed(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            tokens = hf_tokenizer.encode(prompt, add_special_tokens=False)
            output = (await llm_engine.generate.remote(tokens, sampling_params)).outputs[0]
            start, end = len(tokens), len(tokens) + len(output.token_ids)
            result = {
                "observation_tokens": tokens + output.token_ids,
                "action_ranges": [(start, end)],
                "rollout_log_probs": [0.0] * start + [next(iter(entry.values())).logprob for entry in output.logprobs],
                "reward": 1.0,
            }
            change(result)
            return result

    return Changed


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda r: r["observation_tokens"].__setitem__(3, 9),
            r"action range \[2, 5\), whose tokens the engine did not say",
        ),
        (lambda r: r["observation_tokens"].__setitem__(0, 9), "after the 2 tokens before it"),
        (
            lambda r: r["rollout_log_probs"].__setitem__(3, -9.0),
            r"rollout_log_probs\[3\]=-9\.0, where the engine said -2\.0",
        ),
        (lambda r: r.update(rollout_log_probs=[0.0]), "one number a token"),
        (lambda r: r.update(action_ranges=[(4, 3)]), r"action_ranges=\[\[4, 3\]\]: ordered ranges of 5 tokens"),
        (lambda r: r.update(action_ranges=[]), "an action comes after at least one token"),
        (lambda r: r.pop("observation_tokens"), "observation_tokens of None: a list of token ids"),
        (lambda r: r.update(reward=float("nan")), "reward of execute is nan"),
        (lambda r: r.clear() or r.update(x=1), "observation_tokens of None"),
    ],
)
async def test_a_result_that_is_not_what_the_engine_said_is_a_failure(change, problem):
    with pytest.raises(AgentError, match=problem):
        await play_executor(Speaks("xyz"), returns(change))


async def test_the_beginning_of_a_completion_may_be_kept():
    def cut(result):
        result["observation_tokens"] = result["observation_tokens"][:4]
        result["action_ranges"] = [(2, 4)]

    [row] = await play_executor(Speaks("xyz"), returns(cut))

    assert (actions_of(row), numbers(row.rollout_logprobs)) == ([ids("xy")], [0, 0, -1, -2])


async def test_log_probs_may_be_left_out():
    [row] = await play_executor(Speaks("xyz"), returns(lambda r: r.pop("rollout_log_probs")))

    assert numbers(row.rollout_logprobs) == [0, 0, -1, -2, -3]


async def test_another_temperature_is_refused():
    class Hot(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            sampling_params.temperature = 2.0
            await llm_engine.generate([1], sampling_params)

    with pytest.raises(AgentError, match=r"llm_engine\.generate sets temperature=2\.0"):
        await play_executor(Speaks("xyz"), Hot)


# --- what a file holds


async def test_what_plays_is_found_by_looking(load):
    found = [(await load(name)).name.rpartition(": ")[2] for name in ("openrlhf_agent.py", "openrlhf_executor.py")]

    assert found == ["AgentInstance", "AgentExecutor"]


async def test_a_file_that_cannot_be_imported_is_refused_before_the_first_episode(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("import nothing_of_this_name\n")

    with pytest.raises(ConfigError, match=r"agent\.py.*cannot be imported: ModuleNotFoundError"):
        await load_agent(config_of(file), {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def play(): ...\nx = 1\n", r"holds no agent, only play: it needs a class AgentInstance"),
        ("class AgentInstance:\n    def reset(self, states): ...\n", "AgentInstance has no step"),
        ("AgentInstance = 3\n", "AgentInstance is of type int, not a class"),
        ("class AgentExecutor: ...\n", "no class over AgentExecutorBase or MultiTurnAgentExecutor"),
        ("run_agent = 3\n", "run_agent is of type int"),
        (
            "class AgentInstance:\n    def reset(self, s): ...\n    def step(self, s): ...\ndef run_agent(p, l, c): ...\n",
            "holds both AgentInstance and run_agent",
        ),
        (
            "from rlhf_core.agents import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase):\n"
            "    async def execute(self, episode): ...\n",
            r"AgentExecutor\.execute takes \(episode\): it needs prompt, label",
        ),
    ],
)
def test_a_file_without_an_agent_is_refused(tmp_path, text, problem):
    file = tmp_path / "agent.py"
    file.write_text(text)

    with pytest.raises(ConfigError, match=problem):
        find_agent(str(file))


def test_a_function_is_found(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("async def run_agent(prompt, label, client): ...\n")

    assert find_agent(str(file)).kind is AgentKind.FUNCTION
