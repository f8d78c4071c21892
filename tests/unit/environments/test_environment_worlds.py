"""The environments themselves: what they show, what they hear, what comes of it."""

import io
import random
import re
import sys

import numpy as np
import pytest
from PIL import Image

from rlhf_core.environments.base import OwnRandomness
from rlhf_core.environments.opening import opened
from rlhf_core.environments.reasoning import answer_in
from rlhf_core.environments.registry import make_environment
from rlhf_core.environments.spec import EpisodeSpec, digest_of, parse_environment
from rlhf_core.environments.toy_text import action_in
from rlhf_core.errors import ConfigError, DataError

pytestmark = pytest.mark.agents


def episode(spec, index=0):
    return list(parse_environment(spec).episodes())[index]


def begun(spec, index=0):
    return opened(episode(spec, index))


# --- how a dataset is named


def test_a_name_with_options():
    spec = parse_environment(
        "env:textarena/GuessTheNumber-v0?size=3&seed=1&max_number=8&invalid_reward=-0.1&name=guess"
    )

    assert (spec.environment, spec.size, spec.seed) == ("textarena/GuessTheNumber-v0", 3, 1)
    assert (spec.settings.options, spec.settings.invalid_reward) == ({"max_number": 8}, -0.1)
    assert spec.datasource == "guess"


def test_episodes_have_seeds_of_their_own_and_two_datasets_share_none():
    one, other = (parse_environment(f"env:gymnasium/Taxi-v4?size=50&seed={seed}") for seed in (0, 1))

    seeds = [{e.seed for e in spec.episodes()} for spec in (one, other)]

    assert [len(of_one) for of_one in seeds] == [50, 50]
    assert not seeds[0] & seeds[1]
    assert one.datasource == "gymnasium/Taxi-v4"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("env:GuessTheNumber", "names no environment"),
        ("env:textarena/X?size=0", "at least 1"),
        ("env:textarena/X?size=many", "whole number"),
        ("env:textarena/X?invalid_reward=bad", "a number is wanted"),
        ("env:textarena/X?size", "key=value"),
        ("env:textarena/X?a=1&a=2", "given twice"),
    ],
)
def test_a_name_that_says_nothing_is_refused(spec, said):
    with pytest.raises(DataError, match=said):
        parse_environment(spec)


def test_a_label_makes_the_environment_again():
    one = episode("env:gymnasium/FrozenLake-v1?random_map=4&is_slippery=false&instruction=Go.", 1)

    again = EpisodeSpec.from_label(one.to_label("seen"))

    assert again == one
    assert one.to_label("seen")["observation_sha256"] == digest_of("seen")
    with pytest.raises(DataError, match="describes no environment"):
        EpisodeSpec.from_label("21")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("env:textarna/GuessTheNumber-v0", "did you mean textarena"),
        ("env:textarena/GuesTheNumber-v0", "did you mean GuessTheNumber-v0"),
        ("env:reasoning_gym/chain_sums", "did you mean chain_sum"),
        ("env:gymnasium/FrozenLak-v1", "did you mean FrozenLake-v1"),
        ("env:gymnasium/CartPole-v1", "there are"),
        ("env:reasoning_gym/chain_sum?min_trems=2", "min_terms"),
        ("env:reasoning_gym/chain_sum?attempts=0", "attempts=0"),
        ("env:gymnasium/FrozenLake-v1?slippery=true", "refuses its options"),
        ("env:gymnasium/Taxi-v4?random_map=4", "is of FrozenLake"),
        ("env:gymnasium/Taxi-v4?render=human", "rgb_array"),
        ("env:textarena/GuessTheNumber-v0?maximum=8", "refuses its options"),
        ("env:textarena/TicTacToe-v0", "cannot be played here"),
        ("env:textarena/TwentyQuestions-v0", "cannot be played here"),
        ("env:textarena/Klondike-v0", "cannot be played here"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(spec, said):
    with pytest.raises(ConfigError, match=said):
        begun(spec)


def test_nothing_is_downloaded(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("a download"))
    monkeypatch.setattr(nltk.data, "path", [])

    with pytest.raises(ConfigError, match=r"word list 'words'.*nltk\.downloader"):
        begun("env:textarena/Hangman-v0")


def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)

    with pytest.raises(ConfigError, match=r"textarena cannot be imported.*rlhf-flow\[envs\]"):
        make_environment(episode("env:textarena/GuessTheNumber-v0"))


# --- reasoning-gym

SUM = "env:reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&answer=last_number"


def test_a_question_is_scored_by_its_own_rule():
    environment, scene = begun(SUM)
    a, sign, b = re.search(r"(\d) ([+-]) (\d)", scene.text).groups()
    right = int(a) + int(b) if sign == "+" else int(a) - int(b)

    reaction = environment.step(f"Let me see: {a} and {b} make {right}")

    assert (reaction.reward, reaction.done, environment.solved) == (1.0, True, True)


def test_a_second_attempt_is_told_what_was_wrong():
    environment, _ = begun(f"{SUM}&attempts=2&invalid_reward=-0.5")

    first, second = environment.step("none"), environment.step("1000")

    assert (first.reward, first.done, first.info["invalid"]) == (-0.5, False, 1.0)
    assert "1 attempt is left" in first.scene.text
    assert (second.reward, second.done, environment.solved) == (0.0, True, False)


def test_a_scorer_that_raises_on_the_policy_s_text_makes_it_wrong():
    environment, _ = begun("env:reasoning_gym/prime_factorization")

    assert environment.step("no number").reward == 0.0


@pytest.mark.parametrize(
    ("said", "take", "answer"),
    [
        ("  21 ", "text", "21"),
        ("I think <answer> 4 </answer> no <answer>5</answer>!", "text", "5"),
        ("1,024 or -3.5", "last_number", "-3.5"),
        ("it is 1,024", "last_number", "1024"),
        (" ", "text", None),
        ("none", "last_number", None),
    ],
)
def test_where_the_answer_is(said, take, answer):
    assert answer_in(said, take) == answer


# --- textarena


def test_guess_the_number_by_bisection():
    environment, scene = begun("env:textarena/GuessTheNumber-v0", 3)
    low, high, shown = 1, 20, []
    while low <= high:
        guess = (low + high) // 2
        reaction = environment.step(f"[{guess}]")
        shown.append(reaction.scene.text)
        if reaction.done:
            break
        low, high = (guess + 1, high) if "higher" in reaction.scene.text else (low, guess - 1)

    assert "between 1 and 20" in scene.text
    assert (reaction.reward, reaction.done, environment.solved) == (1.0, True, True)
    assert all("You are playing" not in text and "[10]" not in text for text in shown)  # only what is new


def test_a_move_against_the_rules_is_told_and_costs():
    environment, _ = begun("env:textarena/GuessTheNumber-v0?invalid_reward=-0.25")

    first, second = environment.step("hello"), environment.step("hello")

    assert (first.done, first.info["invalid"], first.reward) == (False, 1.0, -0.25)
    assert "invalid move" in first.scene.text
    assert (second.done, second.info["invalid"], environment.solved) == (True, 1.0, False)


def test_the_episode_depends_on_its_seed_and_nobody_else_notices():
    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), np.random.random())
    random.seed(5)
    np.random.seed(5)

    shown = [begun("env:textarena/Mastermind-v0")[0].step("[1 2 3 4]").scene.text for _ in range(2)]

    assert shown[0] == shown[1]
    assert (random.random(), np.random.random()) == expected


def test_a_generator_of_ones_own_goes_on_where_it_was():
    alone = random.Random(3)
    own = OwnRandomness(3)
    drawn = []
    for _ in range(3):
        with own:
            drawn.append(random.random())
        random.random()

    assert drawn == [alone.random() for _ in range(3)]


def test_a_game_prints_nothing(capsys):
    environment, _ = begun("env:textarena/Sokoban-v0")
    environment.step("[up]")

    assert capsys.readouterr() == ("", "")


# --- gymnasium


def test_a_frozen_lake_in_words():
    environment, scene = begun("env:gymnasium/FrozenLake-v1?is_slippery=false")
    reactions = [environment.step(f"I go {where}.") for where in ("down", "down", "right", "right", "down", "right")]

    assert "[S] F  F  F" in scene.text
    assert "Answer with one of: left, down, right, up." in scene.text
    assert "[F] H  F  H" in reactions[0].scene.text
    assert [r.reward for r in reactions] == [0, 0, 0, 0, 0, 1]
    assert (reactions[-1].done, environment.solved) == (True, True)
    assert reactions[-1].scene.text.endswith("You did it.")


def test_what_is_no_action_moves_nothing():
    environment, _ = begun("env:gymnasium/FrozenLake-v1?is_slippery=false&invalid_reward=-0.1")

    said, moved = environment.step("what now?"), environment.step("right")

    assert (said.reward, said.done, said.info) == (-0.1, False, {"invalid": 1.0})
    assert "names no action" in said.scene.text
    assert "S [F] F  F" in moved.scene.text.replace("\n ", "\n")


def test_each_episode_may_have_a_map_of_its_own():
    shown = [begun("env:gymnasium/FrozenLake-v1?random_map=5", index)[1].text for index in (0, 1, 0)]

    assert shown[0] == shown[2] != shown[1]
    assert "5 by 5" in shown[0]


def test_the_end_of_the_time():
    environment, _ = begun("env:gymnasium/FrozenLake-v1?is_slippery=false&max_episode_steps=2")

    reactions = [environment.step("left"), environment.step("left")]

    assert [r.done for r in reactions] == [False, True]
    assert reactions[-1].scene.text.endswith("There is no time left.")


@pytest.mark.parametrize(
    ("world", "shown", "action"),
    [
        ("Taxi-v4", "The destination is", "north"),
        ("CliffWalking-v1", "[o] C  C", "up"),
        ("Blackjack-v1", "The dealer shows", "hit"),
        ("FrozenLake8x8-v1", "8 by 8", "right"),
    ],
)
def test_the_other_worlds(world, shown, action):
    environment, scene = begun(f"env:gymnasium/{world}")
    reaction = environment.step(action)
    environment.close()

    assert shown in scene.text
    assert reaction.info == {"invalid": 0.0}


def test_a_picture_of_the_world():
    environment, scene = begun("env:gymnasium/FrozenLake-v1?is_slippery=false&render=rgb_array")
    first, second = environment.step("right"), environment.step("right")

    assert scene.image is None  # a prompt has no picture
    assert Image.open(io.BytesIO(first.scene.image)).size == (256, 256)
    assert first.scene.image != second.scene.image


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("LEFT", 0),
        ("left, then down", 1),
        ("upright", None),
        ("[3]", 3),
        ("[7]", None),
        ("3", None),
        ("down [9]", 1),
        ("", None),
    ],
)
def test_which_action_is_meant(said, number):
    assert action_in(said, ("left", "down", "right", "up")) == number
