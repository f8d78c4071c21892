"""Finding functions, and refusing at the start what cannot work, with the key named."""

from __future__ import annotations

import sys

import pytest
from reward_rig import write_file

from rlhf_core.config.model import RewardConfig
from rlhf_core.errors import ConfigError
from rlhf_core.rewards import check_reward_config, make_reward_source
from rlhf_core.rewards.contract import FunctionSpec
from rlhf_core.rewards.functions import default_name, load_function

COLUMNS = {"queries": ["Qa"], "prompts": ["Q"], "labels": [1], "answers": ["a"], "datasources": ["d"]}


def load(use, **args):
    return load_function(FunctionSpec("reward.functions[0].use", use, args))


def functions(*entries):
    return RewardConfig.model_validate({"functions": entries})


def test_a_file_gives_its_reward_func(tmp_path):
    use = write_file(tmp_path, "def reward_func(queries, prompts, labels, **kwargs): return [kwargs['bonus']]")

    assert load(use, bonus=2)(COLUMNS) == [2]


def test_a_file_may_name_another_function_and_import_its_neighbour(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_file(tmp_path, "VALUE = 3", "reward_neighbour.py")
    use = write_file(tmp_path, "import reward_neighbour\ndef mine(q, p, l): return [reward_neighbour.VALUE]")

    assert load(f"{use}:mine")(COLUMNS) == [3]


def test_two_functions_of_a_file_share_one_module(tmp_path):
    use = write_file(tmp_path, "seen = []\ndef a(q, p, l): return seen\ndef b(q, p, l): return seen")

    assert load(f"{use}:a")(COLUMNS) is load(f"{use}:b")(COLUMNS)


def test_a_module_path():
    assert load("rlhf_core.rewards.builtins:digits")(COLUMNS) == [0.0]


def test_optional_columns_are_given_to_those_who_name_them(tmp_path):
    use = write_file(tmp_path, "def reward_func(q, p, l, answers, datasources): return [answers, datasources]")

    assert load(use)(COLUMNS) == [["a"], ["d"]]


def test_the_mark_of_group_wise_functions(tmp_path):
    code = """
    from rlhf_core.rewards import group_wise
    @group_wise
    def ranked(q, p, l): return [0.0]
    def plain(q, p, l): return [0.0]
    """
    use = write_file(tmp_path, code)

    assert [load(f"{use}:{name}").group_wise for name in ("ranked", "plain")] == [True, False]


@pytest.mark.parametrize(
    ("code", "suffix", "named"),
    [
        ("x = 1", "", "no function 'reward_func'"),
        ("reward_func = 1", "", "is of type int, not a function"),
        ("async def reward_func(q, p, l): ...", "", "make it a plain one"),
        ("def reward_func(q): ...", "", "too many positional arguments"),
        ("import nowhere_to_be_found", ":f", "No module named 'nowhere_to_be_found' (mine.py:1)"),
        ("def f(:", ":f", "SyntaxError"),
        ("raise SystemExit(3)", ":f", "SystemExit: 3 (mine.py:1)"),
        ("f = type", ":f", "cannot be called as f(queries, prompts, labels, **args)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(tmp_path, code, suffix, named):
    use = write_file(tmp_path, code) + suffix

    with pytest.raises(ConfigError) as error:
        load(use)

    assert f"reward.functions[0].use={use!r}" in str(error.value)
    assert named in str(error.value)


def test_every_bad_key_is_named_at_once(tmp_path):
    """The check runs in a process of its own and reports all functions."""
    marker = tmp_path / "imported"
    good = write_file(tmp_path, f"open({str(marker)!r}, 'w').close()\ndef reward_func(q, p, l): return []")
    config = functions(
        {"use": good},
        {"use": "absent.py"},
        {"use": "digit"},
        {"use": "exact_match", "args": {"stripp": True}},
        {"use": "regex", "args": {"pattern": "("}},
        {"use": "length", "args": {"target": 3, "scale": 0}},
    )

    with pytest.raises(ConfigError) as error:
        check_reward_config(config)

    lines = str(error.value).split("\n")
    assert [line.split("=")[0] for line in lines] == [
        "reward.functions[1].use",
        "reward.functions[2].use",
        "reward.functions[3].args",
        "reward.functions[4].args",
        "reward.functions[5].args",
    ]
    assert "no such file" in lines[0]
    assert "exact_match, last_number" in lines[1]
    assert "unexpected keyword argument 'stripp'" in lines[2]
    assert "unterminated" in lines[3]
    assert marker.exists()


def test_a_good_configuration_passes_without_importing_user_code_here(tmp_path):
    write_file(tmp_path, "import os\nPID = os.getpid()\ndef reward_func(q, p, l): return []", "only_in_the_worker.py")

    check_reward_config(RewardConfig(remote_url=(str(tmp_path / "only_in_the_worker.py"),)))

    assert not [name for name in sys.modules if "only_in_the_worker" in name]


def test_a_file_that_kills_its_process_is_refused(tmp_path):
    use = write_file(tmp_path, "import os; os._exit(7)")

    with pytest.raises(
        ConfigError, match=r"reward\.functions\[0\]\.use=.*while loading, its process exited with code 7"
    ):
        check_reward_config(functions({"use": use}))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "no reward source"),
        ({"model_name_or_path": "some/model"}, "reward.model_name_or_path='some/model', but the model given is None"),
        ({"functions": [{"use": "digits"}, {"use": "digits"}]}, r"set reward.functions\[1\].name"),
        (
            {"functions": [{"use": "digits"}, {"use": "length", "name": "remote"}], "remote_url": "http://a"},
            r"functions\[1\]: the name 'remote' is taken by the reward's part 'remote'",
        ),
        ({"functions": [{"use": "digits", "args": {"x": {1, 2}}}]}, r"reward.functions\[0\].args=.* only JSON"),
    ],
)
def test_make_refuses_what_needs_no_loading(config, named):
    with pytest.raises(ConfigError, match=named):
        make_reward_source(RewardConfig.model_validate(config))


@pytest.mark.parametrize(
    ("use", "name"),
    [
        ("digits", "digits"),
        ("a/mine.py", "mine"),
        ("a/mine.py:f", "f"),
        ("pkg.mod:f", "f"),
        ("pkg.mod:reward_func", "mod"),
    ],
)
def test_default_names(use, name):
    assert default_name(use) == name
