import pytest
import torch

from rlhf_core.algorithms.ema import start_ema, update_ema
from rlhf_core.errors import TrainingError


def averaged(steps, average=None, dtype=torch.float32):
    average = average or start_ema({"w": torch.tensor([1.0], dtype=dtype)})
    for _ in range(steps):
        update_ema(average, {"w": torch.tensor([1.02])}, beta=0.992)
    return average


@pytest.mark.golden
def test_average_of_a_constant():
    assert averaged(1000)["w"].item() == pytest.approx(1.019994, abs=1e-6)


@pytest.mark.golden
def test_case_19_average_survives_a_resume():
    saved = {name: tensor.clone() for name, tensor in averaged(500).items()}

    assert averaged(500, saved)["w"].item() == averaged(1000)["w"].item()


def test_bf16_parameters_do_move_the_average():
    assert averaged(10, dtype=torch.bfloat16)["w"].item() > 1.001


def test_the_average_shares_no_memory_with_the_model():
    parameter = torch.ones(1, dtype=torch.float64)

    average = start_ema({"w": parameter})
    parameter.zero_()

    assert average["w"].item() == 1


def test_another_model_is_an_error():
    with pytest.raises(TrainingError, match=r"differ in \['v', 'w'\]"):
        update_ema(start_ema({"w": torch.ones(1)}), {"v": torch.ones(1)}, beta=0.9)
