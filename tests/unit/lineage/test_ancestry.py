"""From a run back to the data behind its models.

ppo ─┬ policy, reference ▶ sft v2     ─▶ builtin:tiny
     └ critic, reward    ▶ reward v5  ─▶ sft v2
"""

import pytest

from rlhf_core.lineage import ancestry, draw
from rlhf_core.storage import RunStore

PROMPTS, ANSWERS, PAIRS = "tasks.py:prompts", "tasks.py:sft", "tasks.py:pairs"


def wrote(root, run_id, kind, dataset, hour, **models):
    """A run that was started at ``hour``; a model is a base model's name, or (spec, version)."""
    key = "prompt_dataset" if kind == "rlhf" else "dataset"
    store = RunStore(run_id, str(root))
    recorded = {
        role: {"spec": model} if isinstance(model, str) else pinned(store, *model) for role, model in models.items()
    }
    store.write_run(
        {
            "run_id": run_id,
            "kind": kind,
            "created_at": f"2026-01-01T{hour:02d}:00:00+00:00",
            "config": {"data": {key: [dataset]}},
            "plan": {"fingerprint": f"{run_id}-rows-are-hashed-here"},
            "models": recorded,
        }
    )
    return store


def pinned(user, spec, version):
    run_id = spec.removeprefix("run:").partition("@")[0].rpartition("/")[2]
    url = f"{user.root}/{run_id}/checkpoints/v{version:08d}"
    return {"spec": spec, "run": run_id, "version": version, "digest": f"digest-of-{run_id}-{version}", "url": url}


@pytest.fixture
def rlhf(tmp_path):
    """The log of the last of three runs."""
    wrote(tmp_path, "sft", "sft", ANSWERS, 1, policy="builtin:tiny")
    wrote(tmp_path, "reward", "reward_model", PAIRS, 2, policy=("run:sft", 2))
    return wrote(
        tmp_path,
        "ppo",
        "rlhf",
        PROMPTS,
        3,
        policy=("run:sft@best", 2),
        reference=("run:sft@best", 2),
        critic=("run:reward", 5),
        reward=("run:reward", 5),
    )


def test_the_policy_goes_back_to_the_preferences_and_to_the_base_model(rlhf):
    ppo = ancestry(rlhf)

    policy, reward = ppo.models
    assert (ppo.kind, ppo.datasets) == ("rlhf", (PROMPTS,))
    assert (policy.roles, policy.version, policy.run.run_id) == (("policy", "reference"), 2, "sft")
    assert (reward.roles, reward.digest) == (("critic", "reward"), "digest-of-reward-5")
    assert (reward.run.kind, reward.run.datasets) == ("reward_model", (PAIRS,))
    assert reward.run.fingerprint == "reward-rows-are-hashed-here"
    [base] = policy.run.models
    assert (base.spec, base.run, base.url) == ("builtin:tiny", None, None)


def test_a_run_that_two_others_used_is_one(rlhf):
    policy, reward = ancestry(rlhf).models

    assert reward.run.models[0].run is policy.run


def test_the_tree_as_text(rlhf):
    assert draw(ancestry(rlhf)) == [
        "ppo: trained by rewards on tasks.py:prompts (fingerprint ppo-rows-are)",
        "├─ policy, reference: version 2 of sft: SFT on tasks.py:sft (fingerprint sft-rows-are)",
        "│  └─ policy: builtin:tiny",
        "└─ critic, reward: version 5 of reward: reward model on tasks.py:pairs (fingerprint reward-rows-)",
        "   └─ policy: version 2 of sft, see above",
    ]


def test_other_versions_of_one_run_are_other_models(tmp_path):
    wrote(tmp_path, "sft", "sft", ANSWERS, 1, policy="builtin:tiny")
    dpo = wrote(tmp_path, "dpo", "dpo", PAIRS, 2, policy=("run:sft", 2), reference=("run:sft@1", 1))

    assert [(model.roles, model.version) for model in ancestry(dpo).models] == [(("policy",), 2), (("reference",), 1)]


def test_there_is_no_ancestry_of_nothing(tmp_path):
    assert ancestry(RunStore("nope", str(tmp_path))) is None


def test_a_run_that_is_gone_is_shown_as_gone(tmp_path):
    ppo = wrote(tmp_path, "ppo", "rlhf", PROMPTS, 3, policy=("run:sft", 2))

    [policy] = ancestry(ppo).models

    assert (policy.run, policy.problem) == (None, "there is no such run any more")
    assert draw(ancestry(ppo))[1] == (
        f"└─ policy: version 2 of run:sft ({ppo.root}/sft/checkpoints/v00000002): there is no such run any more"
    )


def test_a_run_made_anew_in_its_place_is_not_taken_for_it(tmp_path):
    """It was started after the one that used its model."""
    wrote(tmp_path, "sft", "sft", "others.jsonl", 4, policy="builtin:tiny")
    ppo = wrote(tmp_path, "ppo", "rlhf", PROMPTS, 3, policy=("run:sft", 2))

    [policy] = ancestry(ppo).models

    assert (policy.run, policy.problem) == (None, "its run was made anew since")


def test_records_that_go_in_a_circle_end(tmp_path):
    wrote(tmp_path, "a", "sft", ANSWERS, 1, policy=("run:b", 1))
    b = wrote(tmp_path, "b", "sft", ANSWERS, 1, policy=("run:a", 1))

    [through_a] = ancestry(b).models[0].run.models

    assert (through_a.run, through_a.problem) == (None, "its records lead back to this run")


def test_a_run_may_lie_elsewhere(tmp_path):
    """run:URL; and what that run names without one lies beside it."""
    there, here = tmp_path / "there", tmp_path / "here"
    wrote(there, "base", "sft", ANSWERS, 1, policy="builtin:tiny")
    wrote(there, "sft", "sft", ANSWERS, 2, policy=("run:base", 1))
    ppo = wrote(here, "ppo", "rlhf", PROMPTS, 3, policy=(f"run:file://{there}/sft", 2))

    sft = ancestry(ppo).models[0].run

    assert (sft.run_id, sft.models[0].run.run_id) == ("sft", "base")


def test_a_run_of_the_first_format_was_trained_by_rewards(tmp_path):
    store = RunStore("old", str(tmp_path))
    store.write_run(
        {
            "created_at": "2026",
            "config": {"data": {"prompt_dataset": [PROMPTS]}},
            "plan": {"fingerprint": "f"},
            "models": {"policy": {"spec": "builtin:tiny"}},
        }
    )

    assert ancestry(store).kind == "rlhf"
