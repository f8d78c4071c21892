"""docs/configuration.md says what the schema says."""

from pathlib import Path

from config_samples import config

from rlhf_core.config.chain import StageConfig
from rlhf_core.config.document import render
from rlhf_core.config.retrain import RetrainConfig
from rlhf_core.config.supervised import SupervisedConfig

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def keys(tree, prefix=""):
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        yield from keys(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == render(), "docs/configuration.md is stale: run `make docs`"


def supervised_keys():
    tree = SupervisedConfig.model_validate({"model": {"model_name_or_path": "m"}, "data": {"dataset": "d.jsonl"}})
    return keys(tree.model_dump())


def chain_keys():
    return ["common", *(f"stages.{name}" for name in StageConfig.model_fields)]


def retrain_keys():
    return keys(RetrainConfig(name="n", config="c").model_dump())


def test_every_key_has_a_row_with_a_meaning():
    rows = {line.split("`")[1]: line for line in render().splitlines() if line.startswith("| `")}

    assert set(rows) == {*keys(config().model_dump()), *supervised_keys(), *chain_keys(), *retrain_keys()}
    assert [line for line in render().splitlines() if line.startswith("| `") and not line.split("|")[3].strip()] == []
