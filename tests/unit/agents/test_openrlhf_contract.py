"""Two more agent files as OpenRLHF's published contract allows them, each in processes of the real pool."""

import io
from pathlib import Path

import pytest
from PIL import Image
from turn_script import Speaks, actions_of, ids, plain, tokenizer, turns_episode

from rlhf_core.agents.loading import load_agent
from rlhf_core.config import parse_config
from rlhf_core.records import ImageRef, StopReason

pytestmark = pytest.mark.agents

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
async def load():
    """Load an agent file, each once."""
    loaded = {}

    async def get(name):
        if name in loaded:
            return loaded[name]
        sections = {
            "actor": {"model_name_or_path": "builtin:tiny"},
            "data": {"prompt_dataset": "p.jsonl"},
            "train": {"agent_func_path": str(DATA / name)},
            "agent": {"max_processes": 2},
        }
        loaded[name] = await load_agent(parse_config(sections), None)
        return loaded[name]

    yield get
    for agent in loaded.values():
        await agent.close()


class Intake:
    """Writes down the files; each image is two tokens of a text without its ``<image>``."""

    def __init__(self):
        self.seen = []

    async def tokenise(self, text, images):
        self.seen += [Image.open(io.BytesIO(image)).getpixel((0, 0)) for image in images]
        before, after = text.split("<image>")
        start = len(ids(before))
        return [*ids(before), 7, 7, *ids(after)], (ImageRef("s", "images/s.png", start, start + 2),)


async def test_async_init_seeded_numpy_bfloat16_rewards_and_shorter_turns(load):
    agent = await load("openrlhf_dice_agent.py")
    policy = Speaks("000000", "000000", "000000")

    [row] = await agent.executor.execute(turns_episode(policy, plain("ab"), environment_seed=5))
    [again] = await agent.executor.execute(turns_episode(Speaks(*["000000"] * 3), plain("ab"), environment_seed=5))

    assert row.prompt == "ab(7) "
    assert [len(said) for said in actions_of(row)] == [6, 4, 4]  # from the second turn on, the agent wants 4 tokens
    assert (row.reward, row.score, row.stop_reason) == (0.0, 0.0, StopReason.DONE)
    assert (row.metrics["agent/hit"], row.metrics["agent/steps"], row.metrics["agent/dropped_logs"]) == (0.0, 3.0, 3.0)
    assert row.token_ids.tolist() == again.token_ids.tolist()  # the rolls are those of the seed


async def test_a_hit_ends_the_episode(load):
    agent = await load("openrlhf_dice_agent.py")

    [row] = await agent.executor.execute(turns_episode(Speaks("123456"), plain("ab"), environment_seed=5))

    assert (row.reward, row.score, len(row.action_ranges)) == (1.0, 1.0, 1)


async def test_pictures_of_the_environment(load):
    """The picture of the last step is shown to nobody."""
    agent, intake = await load("openrlhf_picture_agent.py"), Intake()

    [row] = await agent.executor.execute(turns_episode(Speaks("red", "blue"), plain("ab"), images=intake))

    assert intake.seen == [(0, 128, 0)]
    assert row.token_ids.tolist() == [
        256,
        *ids("ab"),
        *ids("red"),
        *ids("\n"),
        7,
        7,
        *ids("\nUSER: and this?\nASSISTANT: blue"),
    ]
    [image] = row.images
    assert row.token_ids[image.start : image.end].tolist() == [7, 7]
    assert [step.reward for step in row.step_rewards] == [1.0, 0.0]
    assert (row.reward, row.score, row.metrics["agent/right"]) == (1.0, 0.0, 0.0)
    assert tokenizer().decode(actions_of(row)[1]) == "blue"
