"""Files, their parents and overrides."""

import subprocess
import sys
from pathlib import Path

import pytest
from config_samples import MINIMAL, config
from pydantic import ValidationError

from rlhf_core.config import (
    apply_overrides,
    kind_of,
    load_chain_config,
    load_config,
    load_retrain_config,
    load_supervised_config,
    parse_config,
    plan_chain,
    plan_turn,
    read_yaml,
)
from rlhf_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
BASE = (
    "actor: {model_name_or_path: builtin:tiny}\ndata: {prompt_dataset: p.jsonl}\nreward: {functions: [{use: digits}]}\n"
)


def written(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


# --- keys


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("rolout.batch_size=4", "rollout"),
        ("rollout.batchsize=4", "rollout.batch_size"),
        ("algo.advantage.estimater=rloo", "algo.advantage.estimator"),
        ("critic.adam.lrate=1", "critic.adam.lr"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(override, suggestion):
    with pytest.raises(ConfigError, match=rf"unknown key '{override.split('=')[0].split('.')[0]}.*mean {suggestion}\?"):
        config(override)


def test_an_unknown_key_in_a_list_gets_a_suggestion_too():
    with pytest.raises(
        ConfigError, match=r"unknown key 'reward.functions.0.wieght': did you mean reward.functions.weight"
    ):
        config("reward.functions=[{use: digits, wieght: 2}]")


def test_an_unknown_key_like_no_other_points_at_the_page():
    with pytest.raises(ConfigError, match="unknown key 'zzzzzz': see docs/configuration.md"):
        config("zzzzzz=1")


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="actor.model_name_or_path is missing: set it"):
        parse_config({**MINIMAL, "actor": {}})


def test_a_value_of_the_wrong_type_names_the_key_and_the_value():
    with pytest.raises(ConfigError, match="rollout.batch_size='many': .*valid integer"):
        config("rollout.batch_size=many")


def test_a_value_out_of_bounds_names_the_key_and_the_value():
    with pytest.raises(ConfigError, match=r"rollout.top_p=1.5: .*less than or equal to 1"):
        config("rollout.top_p=1.5")


def test_the_tree_is_frozen():
    checked = config()

    with pytest.raises(ValidationError, match="frozen"):
        checked.rollout.batch_size = 4


# --- overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=3", 3),
        ("a.b=1e-6", 1e-6),
        ("a.b=2.5E+3", 2500.0),
        ("a.b=-1e3", -1000.0),
        ("a.b=.5e1", 5.0),
        ("a.b=true", True),
        ("a.b=null", None),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b={c: 1}", {"c": 1}),
        ("a.b=text=with=signs", "text=with=signs"),
        ("a.b='3'", "3"),
        ("a.b=", None),
        ("--a.b=x", "x"),
        ("a.b=[unclosed", "[unclosed"),
        ("a.b=e5", "e5"),
    ],
)
def test_an_override_is_read_as_yaml(override, value):
    read = apply_overrides({}, [override])["a"]["b"]

    assert read == value
    assert type(read) is type(value)


def test_a_later_override_wins():
    assert apply_overrides({}, ["a.b=1", "a.b=2"]) == {"a": {"b": 2}}


def test_overrides_leave_the_mapping_as_it_was():
    data = {"a": {"b": 1}}

    apply_overrides(data, ["a.b=2", "a.c=3"])

    assert data == {"a": {"b": 1}}


@pytest.mark.parametrize("override", ["rollout.batch_size", "=3", " =3"])
def test_an_override_without_key_or_value_is_refused(override):
    with pytest.raises(ConfigError, match=r"write it as section.key=value"):
        apply_overrides({}, [override])


def test_an_override_below_a_value_is_refused():
    with pytest.raises(ConfigError, match="'b' is a value, not a section"):
        apply_overrides({"a": {"b": 1}}, ["a.b.c=2"])


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("data.prompt_dataset=a.jsonl, b.csv,", "data", "prompt_dataset", ("a.jsonl", "b.csv")),
        ("data.prompt_dataset=[a.jsonl]", "data", "prompt_dataset", ("a.jsonl",)),
        ("eval.dataset=h.jsonl", "eval", "dataset", ("h.jsonl",)),
        ("data.prompt_probs=0.25", "data", "prompt_probs", (0.25,)),
        ("actor.adam.lr=1e-6", "actor", "adam", None),
    ],
)
def test_comma_lists(override, section, name, value):
    read = getattr(getattr(config(override), section), name)

    assert (read == value) if value is not None else (read.lr == 1e-6)


def test_comma_lists_of_numbers():
    two = config("data.prompt_dataset=a.jsonl,b.jsonl", "data.prompt_probs=0.25, 0.75")

    assert two.data.prompt_probs == (0.25, 0.75)


def test_a_comma_list_of_words_where_numbers_belong_is_refused():
    with pytest.raises(ConfigError, match="data.prompt_probs='a,b'"):
        config("data.prompt_probs=a,b")


# --- files


def test_extends_nearest_wins(tmp_path):
    """grandparent < parent < second parent < the file < override"""
    written(
        tmp_path,
        grand=BASE + "rollout: {batch_size: 1, top_k: 1, temperature: 0.1, max_new_tokens: 11, min_new_tokens: 1}\n",
        parent="extends: grand.yaml\nrollout: {batch_size: 2, top_k: 2, temperature: 0.2, max_new_tokens: 12}\n",
        second="rollout: {batch_size: 3, top_k: 3, temperature: 0.3}\n",
        file="extends: [parent.yaml, second.yaml]\nrollout: {batch_size: 4, top_k: 4}\n",
    )

    rollout = load_config(tmp_path / "file.yaml", ["rollout.batch_size=5"]).rollout

    found = (rollout.batch_size, rollout.top_k, rollout.temperature, rollout.max_new_tokens, rollout.min_new_tokens)
    assert found == (5, 4, 0.3, 12, 1)


def test_extends_in_a_circle_is_refused(tmp_path):
    written(tmp_path, a="extends: b.yaml\n", b="extends: a.yaml\n")

    with pytest.raises(ConfigError, match=r"a.yaml: `extends` goes in a circle"):
        read_yaml(tmp_path / "a.yaml")


def test_one_parent_twice_is_no_circle(tmp_path):
    written(
        tmp_path,
        base="a: {x: 1}",
        left="extends: base.yaml",
        right="extends: base.yaml",
        top="extends: [left.yaml, right.yaml]",
    )

    assert read_yaml(tmp_path / "top.yaml") == {"a": {"x": 1}}


def test_extends_a_missing_file_is_refused(tmp_path):
    written(tmp_path, a="extends: gone.yaml\n")

    with pytest.raises(ConfigError, match=r"a.yaml: `extends: gone.yaml` names no file \(.*gone.yaml\)"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize("value", ["", "3", "[3]", "{a: 1}"])
def test_extends_something_that_is_no_name_is_refused(tmp_path, value):
    written(tmp_path, a=f"extends: {value}\n")

    with pytest.raises(ConfigError, match="a.yaml: `extends: .*name a file, or a list of files"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: {x: 1}\nb: {y: 2}\na: {x: 3}\n", "line 3: key 'a' stands twice"),
        ("a:\n  x: 1\n  x: 2\n", "line 3: key 'x' stands twice"),
        ("? [a]\n: 1\n", r"line 1: \['a'\] cannot be a key"),
        ("a: [1\n", "is not readable YAML"),
        ("- 1\n", "expected a mapping of sections, found list"),
        ("", "expected a mapping of sections, found NoneType"),
        ("a: !!python/object:os.system {}\n", "is not readable YAML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(tmp_path, text, problem):
    written(tmp_path, odd=text)

    with pytest.raises(ConfigError, match=rf"odd.yaml.*{problem}"):
        read_yaml(tmp_path / "odd.yaml")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "odd.yaml").write_bytes(b"a: \xff\xfe")

    with pytest.raises(ConfigError, match="odd.yaml is not readable YAML"):
        read_yaml(tmp_path / "odd.yaml")


def test_a_missing_file_is_named_with_the_places_looked_at():
    with pytest.raises(ConfigError, match="no configuration file 'nope' .*configs/nope.yaml"):
        load_config("nope")


def test_a_file_in_configs_is_found_by_name(monkeypatch):
    monkeypatch.chdir(ROOT)

    assert load_config("grpo_tiny_cpu") == load_config("configs/grpo_tiny_cpu.yaml")


def test_an_error_names_the_file(tmp_path):
    written(tmp_path, mine=BASE + "eval: {steps: 0}\n")

    with pytest.raises(ConfigError, match=r"mine.yaml:\neval.steps=0"):
        load_config(tmp_path / "mine.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads(path):
    load = {
        "rewards": load_config,
        "supervised": load_supervised_config,
        "chain": lambda path: plan_chain(load_chain_config(path), "demo"),
        "retrain": lambda path: plan_turn(load_retrain_config(path)),
    }

    assert load[kind_of(read_yaml(path))](path)


def test_the_resolved_tree_loads_again_as_it_was():
    """run.json holds ``model_dump(mode="json")``: a resumed run must read the same."""
    first = config("algo.kl.init_coef=0.01", "eval.dataset=h.jsonl", "rollout.stop=['</s>']")

    assert parse_config(first.model_dump(mode="json")) == first


def test_loading_imports_nothing_heavy():
    probe = (
        "import sys, rlhf_core.config as c; c.load_config('configs/grpo_tiny_cpu.yaml');"
        "print({m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'vllm', 'numpy', 'pyarrow', 'prefect', 'mlflow'})"
    )

    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
