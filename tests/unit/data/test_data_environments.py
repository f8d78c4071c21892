"""Datasets of environments: rows, ids, datasources, ratios, refusals."""

import json
from collections import Counter

import pytest

from rlhf_core.config.model import DataConfig
from rlhf_core.data.prompts import load_prompts
from rlhf_core.data.sources import read_rows, source_names
from rlhf_core.errors import DataError
from rlhf_core.records import PromptCursor

pytestmark = pytest.mark.agents

GUESS = "env:textarena/GuessTheNumber-v0?size=6&seed=1"
LAKE = "env:gymnasium/FrozenLake-v1?size=3&random_map=4&is_slippery=false"


def prompts(tokenizer, *specs, **data):
    settings = DataConfig(prompt_dataset=list(specs), **data)
    return load_prompts(settings.prompt_dataset, "train", settings, tokenizer, max_prompt_len=2000)


def test_rows_are_the_same_each_time_and_their_labels_are_json():
    rows = [list(read_rows(LAKE)) for _ in range(2)]

    assert rows[0] == rows[1]
    assert len({row.values["input"] for row in rows[0]}) == 3
    label = rows[0][0].values["label"]
    assert json.loads(json.dumps(label)) == label
    assert label["environment"] == "gymnasium/FrozenLake-v1"
    assert rows[0][1].place.endswith("episode 1")


def test_a_prompt_is_the_first_observation_with_the_instruction_behind_it(tokenizer):
    prompt = prompts(tokenizer, f"{GUESS}&instruction=One number.")[0]

    assert prompt.text.startswith("You are Player 0")
    assert prompt.text.endswith("Enter your guess.\nOne number.")
    assert (prompt.datasource, prompt.row_id) == ("textarena/GuessTheNumber-v0", "textarena/GuessTheNumber-v0:0")


def test_a_name_of_ones_own_tells_two_datasets_of_one_environment_apart():
    easy, hard = f"{GUESS}&max_number=4&name=easy", f"{GUESS}&max_number=99&name=hard"

    assert source_names([easy, hard]) == ["easy", "hard"]
    assert next(iter(read_rows(hard))).values["datasource"] == "hard"


def test_environments_are_mixed_by_ratios(tokenizer):
    """Sizes 6 and 3, weights 3 to 1: an epoch is 6 + 2."""
    mixed = prompts(tokenizer, GUESS, LAKE, prompt_probs=[0.75, 0.25])
    order = mixed.order(seed=0, probs=[0.75, 0.25])

    indices, _ = order.draw(PromptCursor(), 8)

    assert Counter(mixed[index].datasource for index in indices) == {
        "textarena/GuessTheNumber-v0": 6,
        "gymnasium/FrozenLake-v1": 2,
    }


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("env:textarena/GuessTheNumbr-v0", "did you mean GuessTheNumber-v0"),
        ("env:textarena/TicTacToe-v0", "cannot be played here"),
        ("env:atari/Pong", "there is no collection of environments 'atari'"),
        ("env:", "names no environment"),
    ],
)
def test_what_is_not_there_is_refused_with_the_dataset_s_name(spec, said):
    with pytest.raises(DataError, match=said) as refused:
        list(read_rows(spec))

    assert spec in str(refused.value)


def test_an_environment_that_its_seed_does_not_determine_is_refused(monkeypatch):
    from rlhf_core.data import environment_rows

    shown = iter(["one", "another"])
    monkeypatch.setattr(environment_rows, "_first_observation", lambda *_: next(shown))

    with pytest.raises(DataError, match="begins otherwise each time"):
        next(environment_rows.read_environments(LAKE))
