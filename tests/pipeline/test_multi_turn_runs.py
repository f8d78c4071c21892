"""A whole run whose episodes have several turns, on real parts; the environments are processes.

It is stopped in its second iteration, after the advantages, and started again: what it then is, is what its log makes of it.
"""

from pathlib import Path

import numpy as np
import pytest

from flows import iteration
from flows.replay import replay
from flows.train import train
from rlhf_core.data import load_tokenizer, resolve_model
from rlhf_core.records import Stage, action_mask
from rlhf_core.storage import RunStore

pytestmark = [
    pytest.mark.examples,
    pytest.mark.pipeline,
    pytest.mark.stack,
    pytest.mark.agents,
    pytest.mark.timeout(600),
]

AGENT = '''
from rlhf_core.agents import AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    """Wants digits; says after each turn how many it saw."""

    def __init__(self, turns):
        self.turns = turns

    def step(self, states):
        digits = sum(character.isdigit() for character in states["action_text"])
        done = states["turn"] + 1 == self.turns
        return {
            "rewards": digits / 8,
            "environment_feedback": {"role": "user", "content": f"{digits} digits"},
            "done": done,
            "extra_logs": {"digits": digits},
        }
'''
TURNS = 3


@pytest.fixture(scope="module")
async def run(prefect_api, ray_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    file = Path(folder / "digits_agent.py")
    file.write_text(AGENT)
    overrides = [
        f"storage.root={folder / 'runs'}",
        f"train.agent_func_path={file}",
        f"agent.args={{turns: {TURNS}}}",
        "agent.max_turn_tokens=8",
        "agent.max_processes=8",
        "rollout.max_new_tokens=32",
        "rollout.batch_size=2",
        "rollout.n_samples_per_prompt=4",
        "data.max_len=512",
        "data.apply_chat_template=true",
        "reward.functions=[]",
        "train.max_iterations=2",
        "eval.dataset=configs/tasks/digits.py:prompts?count=2&seed=9",
        "ckpt.save_hf=false",
        "run.cpu_threads=1",
    ]
    task = iteration.update

    async def breaks(run_id, of):
        if of == 1:
            raise Stopped
        return await task(run_id, of)

    iteration.update = breaks
    try:
        with pytest.raises(Stopped):
            await train("grpo_tiny_cpu.yaml", overrides, "turns")
    finally:
        iteration.update = task
    await train("grpo_tiny_cpu.yaml", overrides, "turns", "must")
    return RunStore("turns", str(folder / "runs"))


class Stopped(Exception):
    """The flow's process is told to stop."""


def rows_of(run, k):
    return run.read_trajectories(run.stage(k, Stage.ROLLOUT)[0].parts)


async def test_every_episode_has_its_turns_and_each_turn_its_reward(run) -> None:
    for k in range(2):
        rows = rows_of(run, k)
        assert len(rows) == 8
        for row in rows:
            assert len(row.action_ranges) == TURNS
            assert [step.position for step in row.step_rewards] == [end - 1 for _, end in row.action_ranges]
            assert row.reward == pytest.approx(sum(step.reward for step in row.step_rewards))
            assert row.metrics["agent/turns"] == TURNS
            assert {span.version for span in row.version_spans} == {k}
        assert len({row.token_ids.tobytes() for row in rows}) == 8


async def test_the_ids_are_those_of_the_whole_conversation(run) -> None:
    """The turns do not say <|im_end|> (ignore_eos): the template closes them."""
    tokenizer = load_tokenizer(resolve_model("builtin:tiny"))

    for row in rows_of(run, 0):
        between = row.token_ids[row.action_ranges[0].end : row.action_ranges[1].start].tolist()
        said = f"<|im_end|>\n<|im_start|>user\n{row.messages[2]['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert between == tokenizer.encode(said, add_special_tokens=False)


async def test_log_probs_of_engine_and_trainer_agree_in_every_turn(run) -> None:
    for k in range(2):
        assert run.stage(k, Stage.UPDATE)[0].body["metrics"]["mismatch/logprob_abs_max"] < 1e-4
        for row in run.read_experience(run.stage(k, Stage.EXPERIENCE)[0].parts):
            mask = action_mask(row.action_ranges, len(row.token_ids))
            assert np.abs(row.advantages[~mask]).max() == 0


async def test_held_out_prompts_are_played_too(run) -> None:
    metrics = run.read_evaluation(2)["metrics"]

    assert (metrics["eval/prompts"], metrics["eval/failed"]) == (2, 0)


async def test_the_resumed_run_is_reproduced_bit_for_bit_without_agents(run) -> None:
    result = await replay(run.url, "reproduce", iterations="0..1", run_id="turns-again")

    assert result["same"]
