"""The files of a universal checkpoint, on one process without DeepSpeed: what they hold, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlhf_core.errors import TrainingError
from rlhf_core.training import universal
from rlhf_core.training.ranks import RankInfo
from rlhf_core.training.tensor_parallel import Cut
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


# --- layers that are divided over ranks ---------------------------------------------------------------------------------


def part_of(whole, index, size):
    """A rank's part of a learner: rows of the first layer, columns of the second, and the bias of the latter whole."""
    module, optimizer = learner(steps=0, seed=9, shapes=((3, 4), (4, 2)))
    cuts = {"0.weight": 0, "0.bias": 0, "1.weight": 1}
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        for kind, numbers in whole[1].state[dict(whole[0].named_parameters())[name]].items():
            state[kind] = numbers.clone()
        parameter.data = dict(whole[0].named_parameters())[name].detach().clone()
        if name in cuts:
            parameter.cut = cut = Cut(tuple(parameter.shape), cuts[name], size, index, None)
            state.update({kind: cut.part(state[kind]).clone() for kind in ("exp_avg", "exp_avg_sq")})
            parameter.data = cut.part(parameter.data).clone()
    return module, optimizer


def neighbours(size):
    return [RankInfo(index, size, 0, "127.0.0.1", 0, "cpu", tensor_parallel_size=size) for index in range(size)]


def numbers(module, optimizer):
    """Master weights and moments by parameter and kind."""
    found = {(name, "fp32"): parameter.detach() for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        found.update({(name, kind): value for kind, value in optimizer.state[parameter].items()})
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 2), (2, 1), (2, 4), (4, 2)])
def test_layers_go_on_divided_otherwise(tmp_path, before, after):
    whole, other = learner(shapes=((3, 4), (4, 2))), learner(steps=1, seed=5, shapes=((3, 4), (4, 2)))
    for rank_before in neighbours(before):
        written = whole if before == 1 else part_of(whole, rank_before.rank, before)
        save_universal(*written, tmp_path, rank_before)

    for index in range(after):
        read = other if after == 1 else part_of(other, index, after)
        load_universal(*read, tmp_path)

        expected = numbers(*(whole if after == 1 else part_of(whole, index, after)))
        assert all(torch.equal(value, expected[key]) for key, value in numbers(*read).items())


def test_what_no_rank_has_a_part_of_is_written_once(tmp_path):
    whole = learner(shapes=((3, 4), (4, 2)))
    for rank_before in neighbours(2):
        save_universal(*part_of(whole, rank_before.rank, 2), tmp_path, rank_before)

    first, second = (set(load_file(tmp_path / f"rank0000{index}-000.safetensors")) for index in range(2))
    assert "1.weight/fp32@0:1.0.2" in first
    assert "1.weight/fp32@0:1.1.2" in second
    assert {key.partition("/")[0] for key in first - second if "bias" in key} == {"0.bias", "1.bias"}
    assert not [key for key in second if key.startswith("1.bias") or "/step@" in key]


def test_a_part_that_is_missing_is_missed(tmp_path):
    whole = learner(shapes=((3, 4), (4, 2)))
    for rank_before in neighbours(2):
        save_universal(*part_of(whole, rank_before.rank, 2), tmp_path, rank_before)
    (tmp_path / "rank00001-000.safetensors").unlink()

    with pytest.raises(TrainingError, match=r"does not hold 0\.weight whole \(\w+, 6 elements\)"):
        load_universal(*learner(steps=0, shapes=((3, 4), (4, 2))), tmp_path)
