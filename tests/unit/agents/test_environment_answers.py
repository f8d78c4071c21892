"""Whatever an environment answers becomes plain values, or an error that names the key."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from rlhf_core.agents.environment.answers import plain_reset, plain_step, read_step
from rlhf_core.errors import AgentError

pytestmark = pytest.mark.agents

PICTURE = Image.new("RGB", (3, 2), (10, 20, 30))


def png(image):
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize("one", [1, 1.0, True, np.float32(1), np.array([1]), torch.tensor(1.0), torch.tensor([1])])
def test_numbers_of_any_kind(one):
    plain = plain_step({"rewards": one, "scores": one, "done": one, "extra_logs": {"a": one}})

    assert (plain["reward"], plain["score"], plain["done"], plain["logs"]) == (1.0, 1.0, True, {"a": 1.0})
    assert [type(plain[name]) for name in ("reward", "score", "done")] == [float, float, bool]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"rewards": float("nan")}, "rewards of step is nan: a finite number"),
        ({"rewards": torch.tensor(float("inf"))}, "rewards of step is inf"),
        ({"rewards": "1"}, "rewards of step is the str '1': a number"),
        ({"rewards": [1.0]}, r"rewards of step is the list \[1\.0\]"),
        ({"rewards": torch.ones(2)}, "rewards of step is the Tensor .*: one number"),
        ({"rewards": 10**400}, "rewards of step is an integer beyond the range"),
        ({"scores": "high"}, "scores of step"),
        ({"done": "yes"}, "done of step is the str 'yes'"),
        ({"environment_feedback": 3}, "environment_feedback of step is the int 3: text, a chat message or a list"),
        ({"environment_feedback": [{"content": "x"}]}, "a chat message has a role"),
        ({"environment_feedback": []}, "environment_feedback of step"),
        ({"environment_images": [3]}, r"environment_images of step\[0\] is the int 3"),
        ({"environment_images": np.zeros((2, 2, 7), np.uint8)}, r"environment_images of step\[0\] is no array"),
        ({"environment_images": "nowhere.png"}, r"environment_images of step\[0\] cannot be read"),
        ({"sampling_params": 3}, "sampling_params of step is the int 3"),
        ({"reward": 1}, "step answered the key 'reward': 'rewards' is meant"),
        ({"enviroment_feedback": "x"}, "'environment_feedback' is meant"),
        ([1], r"step answered the list \[1\]: a dict is wanted, with rewards"),
        (None, "step answered None"),
    ],
)
def test_a_mistake_names_the_key(answer, problem):
    with pytest.raises(AgentError, match=problem):
        plain_step(answer)


def test_a_mistake_of_reset_names_the_key():
    with pytest.raises(AgentError, match="reset answered the key 'observations': 'observation' is meant"):
        plain_reset({"observations": "x"})


def test_other_keys_are_nobodys_business():
    assert plain_step({"done": True, "info": 3})["done"]
    assert plain_reset({"observation": "x", "label": 3})["observation"] == "x"


@pytest.mark.parametrize("image", [PICTURE, np.asarray(PICTURE), png(PICTURE)], ids=["pil", "array", "bytes"])
def test_images_become_files(image, tmp_path):
    [data] = plain_step({"done": True, "environment_feedback": "x", "environment_images": image})["images"]

    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (10, 20, 30)


def test_an_image_file(tmp_path):
    (tmp_path / "a.png").write_bytes(png(PICTURE))

    assert plain_reset({"environment_images": [tmp_path / "a.png"]})["images"] == [png(PICTURE)]


def test_logs_that_are_no_numbers_are_counted():
    plain = plain_step({"done": True, "extra_logs": {"a": 1, "b": "x", "c": float("nan"), "d": None}})

    assert (plain["logs"], plain["dropped_logs"]) == ({"a": 1.0}, 2)


def test_images_without_words_are_a_mistake():
    with pytest.raises(AgentError, match="environment_images of step without environment_feedback"):
        read_step(plain_step({"done": True, "environment_images": [b"png"]}))
