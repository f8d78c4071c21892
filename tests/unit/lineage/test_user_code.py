"""The user's Python files that a run loads, told from everything else that a configuration says."""

import hashlib

import pytest

from rlhf_core.lineage import changed_code, user_code


@pytest.fixture
def project(tmp_path):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def found(config, folder):
    return sorted(user_code(config, folder))


def test_every_way_to_name_a_file(project):
    folder = project(rewards="a = 1", loss="b = 1", data="c = 1", unused="e = 1", **{"mine/scores": "d = 1"})
    config = {
        "reward": {"functions": [{"use": "rewards.py:score", "args": {"x": 1}}, {"use": "mine.scores:f"}]},
        "algo": {"loss": f"{folder}/loss.py:name"},
        "data": {"prompt_dataset": ["data.py:rows?count=3&seed=1", "plain.jsonl"]},
        "other": ["http://host:8000/x", "key: value", "run:first@best", "none.py", None, 3, "x" * 5000 + ".py"],
    }

    assert found(config, folder) == ["data.py", "loss.py", "mine/scores.py", "rewards.py"]


def test_the_digest_is_of_the_contents(project):
    folder = project(rewards="a = 1")

    assert user_code({"use": "rewards.py"}, folder) == {"rewards.py": hashlib.sha256(b"a = 1").hexdigest()}


@pytest.mark.parametrize(
    ("text", "also"),
    [
        ("import helper", ["pkg/helper.py"]),
        ("import os, helper as h", ["pkg/helper.py"]),
        ("from helper import f", ["pkg/helper.py"]),
        ("from .helper import f", ["pkg/helper.py"]),
        ("from . import helper", ["pkg/helper.py"]),
        ("def f():\n    import helper", ["pkg/helper.py"]),
        ("import top", ["top.py"]),
        ("import lib.deep", ["lib/__init__.py", "lib/deep.py"]),
        ("from lib.deep import name", ["lib/__init__.py", "lib/deep.py"]),
        ("from lib import deep", ["lib/__init__.py", "lib/deep.py"]),
        ("import space.inner", ["space/inner.py"]),
        ("import json, numpy.linalg", []),
        ("from rlhf_core.rewards import RewardResult", []),
        ("import syntax error(", []),
    ],
)
def test_files_that_it_imports_count_too(project, text, also):
    others = ("pkg/helper", "top", "lib/__init__", "lib/deep", "space/inner", "unused")
    folder = project(**{"pkg/rewards": text}, **dict.fromkeys(others, ""))

    assert found({"use": "pkg/rewards.py:f"}, folder) == sorted(["pkg/rewards.py", *also])


def test_imports_go_on_and_circles_end(project):
    folder = project(a="import b", b="import c", c="import a")

    assert found({"use": "a.py"}, folder) == ["a.py", "b.py", "c.py"]


def test_files_elsewhere_are_named_in_full(project, tmp_path):
    folder = project(**{"inside/a": ""})
    (tmp_path / "outside.py").write_text("")

    assert found({"use": f"{tmp_path}/outside.py"}, folder / "inside") == [f"{tmp_path}/outside.py"]


def test_what_changed():
    before, now = {"a.py": "1", "b.py": "1", "c.py": "1"}, {"a.py": "1", "b.py": "2", "d.py": "1"}

    assert changed_code(before, now) == ["b.py was altered", "c.py is not used any more", "d.py is new"]
    assert changed_code(before, before) == []
