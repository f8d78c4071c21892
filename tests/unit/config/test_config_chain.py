"""Chains: their keys, their overrides, and what is refused before anything runs.

chain of the tests     sft ─▶ reward (of sft) ─▶ ppo (of sft and reward)
"""

import copy

import pytest

from rlhf_core.config import kind_of, load_chain_config, parse_chain_config, plan_chain, read_yaml
from rlhf_core.errors import ConfigError

SUPERVISED = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "rows.jsonl"}}
BY_REWARDS = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"model_name_or_path": "m"},
    "algo": {"advantage": {"estimator": "gae"}},
}
CHAIN = {
    "stages": [
        {"name": "sft", "flow": "sft", "config": SUPERVISED},
        {
            "name": "reward",
            "flow": "reward-model",
            "config": SUPERVISED,
            "overrides": ["model.model_name_or_path=run:{sft}"],
        },
        {
            "name": "ppo",
            "flow": "train",
            "config": BY_REWARDS,
            "overrides": [
                "actor.model_name_or_path=run:{sft}",
                "reward.model_name_or_path=run:{reward}",
                "critic.model_name_or_path=run:{reward}@3",
            ],
        },
    ]
}


def chain(*overrides, **changes):
    """``changes``: keys of the chain, or ``NAME__key`` of a stage."""
    of_chain = {name: value for name, value in changes.items() if "__" not in name}
    data = copy.deepcopy({**CHAIN, **of_chain})
    for name in changes.keys() - of_chain.keys():
        stage, _, key = name.partition("__")
        next(s for s in data["stages"] if s["name"] == stage)[key] = changes[name]
    return parse_chain_config(data, overrides)


def plan(*overrides, **changes):
    return {run.name: run for run in plan_chain(chain(*overrides, **changes), "demo")}


# --- what a chain means


def test_every_stage_is_a_run_with_a_name_of_its_own():
    assert [(run.flow, run.run_id) for run in plan().values()] == [
        ("sft", "demo-sft"),
        ("reward-model", "demo-reward"),
        ("train", "demo-ppo"),
    ]


def test_references_become_the_runs_of_earlier_stages():
    runs = plan()

    assert runs["reward"].config.model.model_name_or_path == "run:demo-sft"
    ppo = runs["ppo"].config
    named = [section.model_name_or_path for section in (ppo.actor, ppo.reward, ppo.critic)]
    assert named == ["run:demo-sft", "run:demo-reward", "run:demo-reward@3"]


def test_a_reference_may_stand_in_the_configuration_itself():
    inline = {**SUPERVISED, "model": {"model_name_or_path": "run:{sft}"}}

    assert plan(reward__config=inline, reward__overrides=[])["reward"].config.model.model_name_or_path == "run:demo-sft"


def test_dpo_takes_references_too():
    dpo = {
        "name": "dpo",
        "flow": "dpo",
        "config": SUPERVISED,
        "overrides": ["model.model_name_or_path=run:{sft}", "dpo.ref_model_name_or_path=run:{sft}@1"],
    }
    config = plan_chain(chain(stages=[CHAIN["stages"][0], dpo]), "c")[1].config

    assert (config.model.model_name_or_path, config.dpo.ref_model_name_or_path) == ("run:c-sft", "run:c-sft@1")


def test_what_looks_like_a_reference_in_a_text_stays():
    """run:{} of a prompt template is no model."""
    run = plan("sft:data.input_template='run:{} '")["sft"]

    assert run.config.data.input_template == "run:{} "


# --- overrides


def test_the_nearest_override_wins():
    """the file < common < the stage's < the command line, for all or for one"""
    sft = {**SUPERVISED, "train": {"seed": 1, "batch_size": 1, "max_epochs": 1, "max_steps": 1}}
    runs = plan(
        "train.max_epochs=4",
        "sft:train.max_steps=5",
        common=["train.seed=2", "train.batch_size=2"],
        sft__config=sft,
        sft__overrides=["train.batch_size=3", "train.max_epochs=3"],
        stages=CHAIN["stages"][:2],
    )

    train = runs["sft"].config.train
    assert (train.seed, train.batch_size, train.max_epochs, train.max_steps) == (2, 3, 4, 5)
    other = runs["reward"].config.train
    assert (other.seed, other.batch_size, other.max_epochs, other.max_steps) == (2, 2, 4, None)


@pytest.mark.parametrize("override", ["storage.root=s3://bucket/runs", "--storage.root=s3://bucket/runs"])
def test_a_colon_in_the_value_names_no_stage(override):
    assert {run.config.storage.root for run in plan(override).values()} == {"s3://bucket/runs"}


def test_an_override_for_a_stage_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"'rm:train.seed=1': there is no stage 'rm'; there are sft, reward, ppo"):
        chain("rm:train.seed=1")


def test_overrides_leave_the_chain_as_it_was():
    before = chain()
    before.with_overrides(["train.seed=9"])

    assert before == chain()


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stages": []}, r"stages=\[\] is no chain: list at least one run"),
        ({"reward__name": "sft"}, r"stages.1.name='sft' stands twice: give each stage a name of its own"),
        ({"sft__flow": "ppo"}, r"stages.0.flow='ppo': Input should be 'train', 'sft', 'reward-model' or 'dpo'"),
        ({"sft__name": "a b"}, r"stages.0.name='a b'"),
        ({"sft__stage": 1}, r"unknown key 'stages.0.stage'"),
        ({"steps": 1}, r"unknown key 'steps': did you mean stages\?"),
    ],
)
def test_a_chain_that_cannot_be_meant(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        chain(**changes)


@pytest.mark.parametrize("reference", ["run:{rm}", "run:{reward}", "run:{ppo}", "run:{}@best"])
def test_a_reference_to_no_earlier_stage(reference):
    """unknown, itself, a later one, none"""
    with pytest.raises(ConfigError) as caught:
        plan(reward__overrides=[f"model.model_name_or_path={reference}"])

    assert f"stages.1 (reward): model.model_name_or_path='{reference}' names no earlier stage" in str(caught.value)
    assert "there are run:{sft}" in str(caught.value)


def test_the_first_stage_can_refer_to_none():
    with pytest.raises(ConfigError, match=r"stages.0 \(sft\): .* there are none: it is the first"):
        plan("sft:model.model_name_or_path=run:{sft}")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("ppo:reward.model_name_or_path=run:{sft}", r"run:{sft}' needs a reward model, but sft is a stage of flow sft"),
        ("ppo:actor.model_name_or_path=run:{reward}", r"needs a language model, but reward makes a reward model"),
        ("sft:ckpt.save_hf=false", r"sft has ckpt.save_hf=false, so there is no model to load"),
        ("sft:storage.root=elsewhere", r"below storage.root=.rlhf/runs, but sft writes below elsewhere: .* in common"),
        ("ppo:actor.model_name_or_path=run:{sft}@best", r"sft has no ckpt.best_metric_key: set it there"),
        ("ppo:actor.model_name_or_path=run:{sft}@newest", r"'run:demo-sft@newest' names no run's model"),
    ],
)
def test_a_model_that_does_not_fit_its_place(override, problem):
    with pytest.raises(ConfigError, match=problem):
        plan(override)


@pytest.mark.parametrize(
    "override", ["ppo:critic.model_name_or_path=run:{sft}", "sft:ckpt.best_metric_key=eval/loss", "train.seed=3"]
)
def test_what_fits_is_not_refused(override):
    runs = plan(override, "sft:eval.dataset=h.jsonl", "ppo:actor.model_name_or_path=run:{sft}")

    assert len(runs) == 3


def test_a_reward_model_may_go_on_from_a_reward_model():
    stages = [CHAIN["stages"][1] | {"overrides": []}, CHAIN["stages"][1] | {"name": "more"}]
    stages[1] = stages[1] | {"overrides": ["model.model_name_or_path=run:{reward}"]}

    assert plan(stages=stages)["more"].config.model.model_name_or_path == "run:demo-reward"


def test_mistakes_of_all_stages_show_at_once():
    """Each with its place and remedy; a stage that refers to a broken one adds nothing of its own."""
    with pytest.raises(ConfigError) as caught:
        plan("sft:train.batch_siz=1", "ppo:rollout.batch_size=0")

    lines = str(caught.value).splitlines()
    assert lines == [
        "stages.0 (sft): config:",
        "unknown key 'train.batch_siz': did you mean train.batch_size?",
        "stages.2 (ppo): config:",
        "rollout.batch_size=0: Input should be greater than 0",
    ]


# --- files


def test_a_file_beside_the_chain_is_found(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "model: {model_name_or_path: builtin:tiny}\ndata: {dataset: rows.jsonl}\ntrain: {seed: 5}\n"
    )
    (tmp_path / "chain.yaml").write_text("stages:\n  - {name: a, flow: sft, config: base.yaml}\n")

    [run] = plan_chain(load_chain_config(tmp_path / "chain.yaml", ["a:train.max_epochs=2"]), "c")

    assert (run.config.train.seed, run.config.train.max_epochs) == (5, 2)


def test_a_stage_without_its_file_is_refused():
    with pytest.raises(ConfigError, match=r"stages.0 \(sft\): no configuration file 'gone.yaml'"):
        plan(sft__config="gone.yaml")


def test_an_error_of_the_chain_names_its_file(tmp_path):
    (tmp_path / "chain.yaml").write_text("stages: []\n")

    with pytest.raises(ConfigError, match=r"chain.yaml:\nstages=\[\]"):
        load_chain_config(tmp_path / "chain.yaml")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("chain_tiny_cpu", "chain"),
        ("sft_tiny_cpu", "supervised"),
        ("dpo_tiny_cpu", "supervised"),
        ("ppo_tiny_cpu", "rewards"),
    ],
)
def test_what_a_file_is_for_is_told_by_its_sections(name, kind):
    assert kind_of(read_yaml(f"configs/{name}.yaml")) == kind


def test_a_mixture_is_a_run_by_rewards_with_unknown_keys():
    assert kind_of({**SUPERVISED, **BY_REWARDS}) == "rewards"
