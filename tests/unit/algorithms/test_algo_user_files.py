"""Estimators and losses of a user's file: loaded by name, looked at, and held against the configuration at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.check import check_algorithms
from rlhf_core.algorithms.estimators import Estimator, estimator_named
from rlhf_core.algorithms.losses import LossInput, policy_loss_named
from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError, TrainingError

EXAMPLE = Path(__file__).parents[3] / "configs" / "algorithms" / "example.py"
HEAD = """
import torch
from rlhf_core.algorithms.estimators import Estimator
from rlhf_core.algorithms.losses import LossOutput, loss_output, token_ratio

def loss_of(inputs):
    ratio_BT = token_ratio(inputs)
    return loss_output(inputs, -ratio_BT * inputs.masked_advantages_BT, ratio_BT, inputs.mask_BT)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write the user's file; relative paths start in its folder."""
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / "mine.py").write_text(HEAD + text)


def config(*overrides):
    base = {
        "actor": {"model_name_or_path": "builtin:tiny"},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"functions": [{"use": "digits"}]},
    }
    return parse_config(base, overrides)


def micro_batch(logprobs, old, advantages):
    return LossInput(tensor([logprobs]), tensor([old]), tensor([advantages]), tensor([[True] * len(old)]))


# --- the example -----------------------------------------------------------------------------------------------------


def test_the_example_file_passes_the_check():
    check_algorithms(config(f"algo.advantage.estimator={EXAMPLE}:peers", f"actor.policy_loss_type={EXAMPLE}:sapo"))


@pytest.mark.golden
@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1, -0.577350, -0.577350, -0.577350]),  # case 50: the peers of the first have no spread
        ([0.35] * 7 + [0.0], [0.377964] * 7 + [-0.35]),  # case 49: not thousands
        ([0.1] * 8, [0.0] * 8),  # case 51
        ([3.0, 1.0], [2, -2]),  # one peer has no spread
        ([3.0], [0.0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cases_49_and_50_leave_one_out_and_normalise(rewards, expected, dtype):
    """No built-in estimator does this; the example does, and its spread is never rounding noise."""
    shaped = estimator_named(f"{EXAMPLE}:peers").shape_group(tensor(rewards, dtype=dtype))

    assert shaped.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_soft_gate_of_the_example():
    """At ratio 1 the plain policy gradient; at ratio e the gate is 4 sigmoid(e - 1), and its gradient fades."""
    loss = policy_loss_named(f"{EXAMPLE}:sapo")
    logprobs = tensor([[0.0, 1.0]], requires_grad=True)

    out = loss(LossInput(logprobs, torch.zeros(1, 2), tensor([[1.0, 1.0]]), tensor([[True, True]])))
    out.loss_BT.sum().backward()

    sigmoid = 1 / (1 + 2.718281828**-1.718281828)
    assert out.loss_BT[0].tolist() == pytest.approx([-2, -4 * sigmoid], abs=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx([-1, -4 * sigmoid * (1 - sigmoid) * 2.718281828], abs=1e-6)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_estimator_and_loss_of_a_file(mine):
    mine("half = Estimator('half', lambda rewards_G: rewards_G / 2)\n")

    assert estimator_named("mine.py:half").shape_group(tensor([1.0, 2.0])).tolist() == [0.5, 1]
    assert policy_loss_named("mine.py:loss_of")(micro_batch([-1.0], [-1.0], [3.0])).loss_BT.tolist() == [[-3]]


def test_what_is_no_estimator_is_refused(mine):
    mine("half = 0.5\n")

    with pytest.raises(ConfigError, match=r"estimator='mine\.py:half' is of type float: make it an Estimator"):
        estimator_named("mine.py:half")


def test_what_cannot_be_called_is_refused(mine):
    mine("half = 0.5\n")

    with pytest.raises(ConfigError, match=r"policy_loss_type='mine\.py:half' is of type float: make it a function"):
        policy_loss_named("mine.py:half")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return loss_of(inputs).loss_BT", r"returned a Tensor: return a LossOutput"),
        ("return None", r"returned a NoneType: return a LossOutput"),
        (
            "out = loss_of(inputs)\n    return LossOutput(out.loss_BT.mean(), *[inputs.mask_BT.sum()] * 4)",
            r"returned loss_BT as \(\): make it a tensor of shape \(1, 2\)",
        ),
        (
            "out = loss_of(inputs)\n    return LossOutput(out.loss_BT, 2, 0, 0, 0)",
            r"returned num_tokens as int: make it a tensor of shape \(\)",
        ),
    ],
)
def test_an_answer_of_another_form_is_an_error(mine, body, message):
    """One number for the whole micro-batch would be spread over its tokens in silence."""
    mine(f"def own(inputs):\n    {body}\n")

    with pytest.raises(TrainingError, match=message):
        policy_loss_named("mine.py:own")(micro_batch([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]))


# --- the check at the start ------------------------------------------------------------------------------------------


def test_built_in_names_pass():
    check_algorithms(config())


ESTIMATOR, LOSS = "algo.advantage.estimator=mine.py:own", "actor.policy_loss_type=mine.py:own"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "own = Estimator('own', lambda r: r, needs_critic=True)",
            [ESTIMATOR],
            r"estimator='mine\.py:own' needs the critic's values: set critic\.enable=true",
        ),
        (
            "own = Estimator('own', lambda r: r)",
            [ESTIMATOR, "algo.advantage.gamma=0.9"],
            r"algo\.advantage\.gamma=0\.9 has no meaning with .*: set it to 1, or set free_gamma",
        ),
        (
            "own = Estimator('own', lambda r: r, needs_group=True)",
            [ESTIMATOR, "rollout.n_samples_per_prompt=1"],
            r"compares the samples of one prompt, but rollout\.n_samples_per_prompt=1: set it to 2 or more",
        ),
        (
            "own = Estimator('own', lambda r: r / 0)",
            [ESTIMATOR],
            r"estimator='mine\.py:own' fails on the rewards 1, 0, 0\.5, 0\.25: TrainingError: estimator 'own' made",
        ),
        (
            "own = Estimator('own', lambda r: r.no_such)",
            [ESTIMATOR],
            r"estimator='mine\.py:own' fails on .*: AttributeError: .*no_such",
        ),
        ("own = 3", [ESTIMATOR], r"estimator='mine\.py:own' is of type int"),
        ("1 / 0", [ESTIMATOR], r"estimator='mine\.py:own': the file cannot be imported: ZeroDivisionError"),
        ("", [ESTIMATOR], r"estimator='mine\.py:own': nothing in .*mine\.py is called 'own'"),
        ("def own(a, b): ...", [LOSS], r"policy_loss_type='mine\.py:own' fails on a small example: TypeError: .*'b'"),
        (
            "def own(inputs):\n    with torch.no_grad():\n        return loss_of(inputs)",
            [LOSS],
            r"policy_loss_type='mine\.py:own' has no gradient: make loss_BT from inputs\.logprobs_BT",
        ),
        (
            "def own(inputs):\n    r = token_ratio(inputs)\n    return loss_output(inputs, r / 0, r, inputs.mask_BT)",
            [LOSS],
            r"policy_loss_type='mine\.py:own' gives \[\[0\.0, inf, inf\], .* make every number of it finite",
        ),
    ],
)
def test_what_cannot_work_is_refused(mine, text, overrides, message):
    mine(text)

    with pytest.raises(ConfigError, match=message):
        check_algorithms(config(*overrides))


def test_a_critic_that_nothing_reads_is_refused(mine):
    """The rules of the configuration see this for built-in names only."""
    mine("own = Estimator('own', lambda r: r)")
    checked = config(ESTIMATOR)
    with_critic = checked.model_copy(update={"critic": checked.critic.model_copy(update={"enable": True})})

    with pytest.raises(ConfigError, match=r"critic\.enable=true, but .* does not look at values"):
        check_algorithms(with_critic)


def test_every_problem_is_shown(mine):
    mine("own = Estimator('own', lambda r: r, needs_critic=True)")

    with pytest.raises(ConfigError) as caught:
        check_algorithms(config(ESTIMATOR, "algo.advantage.gamma=0.5", "actor.policy_loss_type=mine.py:gone"))

    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == [
        "algo.advantage.estimator='mine.py:own'",
        "algo.advantage.gamma=0.5",
        "actor.policy_loss_type='mine.py:gone':",
    ]


def test_a_free_gamma_is_allowed_to_who_asks_for_it(mine):
    mine("own = Estimator('own', lambda r: r, free_gamma=True)")

    check_algorithms(config(ESTIMATOR, "algo.advantage.gamma=0.5", "rollout.n_samples_per_prompt=1"))
    assert isinstance(estimator_named("mine.py:own"), Estimator)
