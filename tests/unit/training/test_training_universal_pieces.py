"""The files of a universal checkpoint, on one process without DeepSpeed: what they hold, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhf_core.errors import TrainingError
from rlhf_core.training import universal
from rlhf_core.training.ranks import RankInfo
from rlhf_core.training.universal import load_universal, save_universal


def rank(index=0, world_size=1):
    return RankInfo(index, world_size, 0, "127.0.0.1", 0, "cpu")


def learner(steps=2, seed=0, shapes=((3, 2), (2, 1))):
    torch.manual_seed(seed)
    module = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        step(module, optimizer)
    return module, optimizer


def step(module, optimizer):
    module(torch.ones(4, module[0].in_features)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def test_what_is_loaded_goes_on_as_what_was_saved(tmp_path):
    module, optimizer = learner()
    save_universal(module, optimizer, tmp_path, rank())

    again, other = learner(steps=0, seed=1)
    load_universal(again, other, tmp_path)

    step(module, optimizer)
    step(again, other)
    assert all(torch.equal(weights(again)[name], weight) for name, weight in weights(module).items())


def test_a_file_holds_whole_parameters_by_name_and_kind(tmp_path):
    module, optimizer = learner()

    save_universal(module, optimizer, tmp_path, rank())

    saved = load_file(tmp_path / "rank00000-000.safetensors")
    kinds = ("fp32", "exp_avg", "exp_avg_sq", "step")
    assert saved.keys() == {f"{name}/{kind}@0" for name, _ in module.named_parameters() for kind in kinds}
    assert torch.equal(saved["0.weight/fp32@0"], module[0].weight.detach().flatten())
    assert saved["0.bias/step@0"].tolist() == [2.0]


def test_a_model_that_took_no_step_yet_has_weights_only(tmp_path):
    module, optimizer = learner(steps=0)
    save_universal(module, optimizer, tmp_path, rank())

    again, other = learner(steps=0, seed=1)
    load_universal(again, other, tmp_path)

    assert not other.state
    assert torch.equal(again[0].weight, module[0].weight)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_that_hold_the_same_share_the_writing(tmp_path, monkeypatch, world_size):
    """In files of a limited size: here, one for each kind of each parameter."""
    monkeypatch.setattr(universal, "FILE_BYTES", 1)
    module, optimizer = learner()

    for index in range(world_size):
        save_universal(module, optimizer, tmp_path, rank(index, world_size))

    files = sorted(file.name for file in tmp_path.iterdir())
    assert len(files) == 4 * 4
    assert {name[:9] for name in files} == {f"rank{index:05d}" for index in range(world_size)}
    again, other = learner(steps=0, seed=1)
    load_universal(again, other, tmp_path)
    assert all(torch.equal(weights(again)[name], weight) for name, weight in weights(module).items())


def test_a_parameter_that_is_not_trained_is_the_model_folders_own(tmp_path):
    module, optimizer = learner()
    module[0].weight.requires_grad_(False)

    save_universal(module, optimizer, tmp_path, rank())

    assert not [key for key in load_file(tmp_path / "rank00000-000.safetensors") if key.startswith("0.weight")]


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((3, 2), (2, 1), (1, 1)), r"is of another model: 2\.bias, 2\.weight"),
        (((3, 2),), r"is of another model: 1\.bias, 1\.weight"),
        (((4, 2), (2, 1)), r"does not hold 0\.weight whole \(\w+, 8 elements\)"),
        (((2, 2), (2, 1)), r"does not hold 0\.weight whole \(\w+, 4 elements\)"),
    ],
)
def test_another_model_is_refused(tmp_path, shapes, said):
    save_universal(*learner(), tmp_path, rank())

    with pytest.raises(TrainingError, match=said):
        load_universal(*learner(steps=0, shapes=shapes), tmp_path)


def test_a_rank_whose_files_are_missing_is_missed(tmp_path):
    for index in range(2):
        save_universal(*learner(), tmp_path, rank(index, 2))
    (tmp_path / "rank00001-000.safetensors").unlink()

    with pytest.raises(TrainingError, match=r"is of another model: 0\.bias, 1\.bias"):
        load_universal(*learner(steps=0), tmp_path)


def test_a_folder_without_files_is_no_checkpoint(tmp_path):
    with pytest.raises(TrainingError, match="holds no saved weights: use another checkpoint"):
        load_universal(*learner(steps=0), tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    save_universal(*learner(), tmp_path, rank())
    file = tmp_path / "rank00000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])

    with pytest.raises(TrainingError, match=r"rank00000-000\.safetensors is damaged"):
        load_universal(*learner(steps=0), tmp_path)
