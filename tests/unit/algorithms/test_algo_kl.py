import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.kl import AdaptiveKl, FixedKl, kl_estimate, make_kl_controller
from rlhf_core.errors import ConfigError, TrainingError


@pytest.mark.golden
@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", [0.5, -0.5]), ("k2", [0.125, 0.125]), ("k3", [0.106531, 0.148721])]
)
def test_estimates(kind, expected):
    logprobs, reference = tensor([-1.0, -1.0]), tensor([-1.5, -0.5])

    assert kl_estimate(logprobs, reference, kind).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("kind", "low"), [("k1", -10), ("k2", 10), ("k3", 10)])
def test_estimates_and_their_gradients_stay_finite(kind, low):
    logprobs = tensor([-1000.0, 0.0], requires_grad=True)

    estimate = kl_estimate(logprobs, tensor([0.0, -1000.0]), kind)
    estimate.sum().backward()

    assert estimate.tolist() == [low, 10]
    assert logprobs.grad.tolist() == [0, 0]


def test_gradient_of_k3_pulls_towards_the_reference():
    logprobs = tensor([-1.0], requires_grad=True)

    kl_estimate(logprobs, tensor([-1.5]), "k3").sum().backward()

    assert logprobs.grad.item() == pytest.approx(1 - torch.exp(tensor(-0.5)).item())


def test_unknown_estimate():
    with pytest.raises(ConfigError, match="unknown KL estimate 'k4'"):
        kl_estimate(tensor([0.0]), tensor([0.0]), "k4")


@pytest.mark.golden
@pytest.mark.parametrize(("current", "coef"), [(12, 0.100512), (6, 0.1), (3, 0.099488)])
def test_adaptive_controller(current, coef):
    controller = AdaptiveKl(coef=0.1, target=6, horizon=10000)

    assert controller.updated(current, n_steps=256).coef == pytest.approx(coef, abs=1e-9)


def test_controllers_are_values():
    controller = AdaptiveKl(coef=0.1, target=6, horizon=10000)

    controller.updated(12, 256)

    assert controller.coef == 0.1


def test_adaptive_controller_survives_a_resume():
    """Its coefficient is all its state."""
    straight = AdaptiveKl(coef=0.1, target=6, horizon=10000).updated(12, 256).updated(9, 256)

    half = AdaptiveKl(coef=0.1, target=6, horizon=10000).updated(12, 256)
    resumed = make_kl_controller(half.coef, 6, 10000).updated(9, 256)

    assert resumed == straight


def test_without_a_target_the_coefficient_stays():
    controller = make_kl_controller(0.2, None, 10000)

    assert controller == FixedKl(0.2)
    assert controller.updated(99, 256).coef == 0.2


def test_a_target_makes_it_adaptive():
    assert make_kl_controller(0.2, 6.0, 10000) == AdaptiveKl(0.2, 6.0, 10000)


def test_case_54_kl_that_is_not_finite_leaves_the_coefficient():
    with pytest.raises(TrainingError, match="mean KL nan is not finite"):
        AdaptiveKl(coef=0.1, target=6, horizon=10000).updated(float("nan"), 256)
