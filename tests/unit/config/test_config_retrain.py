"""Retrainings: their keys, their overrides, and what is refused before anything runs."""

import copy

import pytest

from rlhf_core.config import kind_of, load_retrain_config, parse_retrain_config, plan_turn, read_yaml
from rlhf_core.errors import ConfigError

TRAINING = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
    "eval": {"dataset": "held_out.jsonl"},
}


def retraining(*overrides, **changes):
    return parse_retrain_config({"name": "bot", "config": copy.deepcopy(TRAINING), **changes}, overrides)


def test_a_turn_is_the_training_with_its_own_start_prompts_and_model():
    config = plan_turn(retraining(overrides=["train.seed=3"]), "run:s3://b/runs/bot-0001@4", "s3://b/rows.json")

    assert config.actor.model_name_or_path == "run:s3://b/runs/bot-0001@4"
    assert config.data.only_rows == "s3://b/rows.json"
    assert (config.logger.mlflow_model, config.train.seed) == ("bot", 3)


def test_without_a_start_it_is_the_training_as_it_is():
    config = plan_turn(retraining(registered_model="support"))

    assert (config.actor.model_name_or_path, config.data.only_rows) == ("builtin:tiny", None)
    assert config.logger.mlflow_model == "support"


def test_overrides_go_where_their_key_is():
    found = retraining(
        "margin=0.5", "approval.enable=true", "train.seed=9", "--rollout.batch_size=7", overrides=["train.seed=3"]
    )

    assert (found.margin, found.approval.enable) == (0.5, True)
    assert found.overrides == ("train.seed=3", "train.seed=9", "--rollout.batch_size=7")
    assert plan_turn(found).train.seed == 9


def test_the_file_we_ship_says_what_it_is():
    assert kind_of(read_yaml("configs/retrain_tiny_cpu.yaml")) == "retrain"
    assert plan_turn(load_retrain_config("configs/retrain_tiny_cpu.yaml")).logger.mlflow_model == "digits"


def test_a_training_that_lies_beside_the_file(tmp_path):
    (tmp_path / "here.yaml").write_text("name: bot\nconfig: beside.yaml\n")
    (tmp_path / "beside.yaml").write_text("actor: {model_name_or_path: m}\n")

    assert load_retrain_config(tmp_path / "here.yaml").config == str(tmp_path / "beside.yaml")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("eval.dataset=[]", "eval.dataset=.*champion and challenger are compared on held-out prompts"),
        ("ckpt.save_hf=false", "ckpt.save_hf=false: a champion is a model that can be loaded"),
        ("data.only_rows=mine.json", "data.only_rows='mine.json' is set by each turn"),
        ("logger.mlflow_model=mine", "logger.mlflow_model='mine' is set by each turn"),
        ("rollout.batch_size=0", "rollout.batch_size=0"),
        ("registered_model=a/b", "logger.mlflow_model='a/b' cannot name a registered model"),
    ],
)
def test_what_could_not_be_compared_or_promoted_is_refused(override, problem):
    with pytest.raises(ConfigError, match=problem):
        plan_turn(retraining(override))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"margni": 0.1}, "unknown key 'margni': did you mean margin"),
        ({"margin": -1}, "margin=-1"),
        ({"margin": float("nan")}, "margin=nan"),
        ({"name": "a b"}, "name='a b'"),
        ({"name": None}, "name=None"),
        ({"metric": "eval/pass@1"}, "metric='eval/pass@1'.*eval/score_mean"),
        ({"min_new_prompts": 0}, "min_new_prompts=0"),
        ({"approval": {"timeout": 0}}, "approval.timeout=0"),
    ],
)
def test_a_mistake_names_key_and_value(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        retraining(**changes)
