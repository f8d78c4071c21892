"""Storages that leave their device and come back, whatever views they carry. The device is the CPU's own memory here."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from rlhf_core.training import offload as offload_module
from rlhf_core.training.offload import HostOffload, engine_tensors, module_tensors

CPU = torch.device("cpu")


@dataclass
class Bucket:
    """As DeepSpeed has for the gradients of a type."""

    buffer: torch.Tensor


def flat_group(sizes=(5, 3)):
    """A flat tensor and its views, as DeepSpeed lays out a group of parameters."""
    flat = torch.randn(sum(sizes))
    return flat, list(flat.split(list(sizes)))


def test_views_hold_again_after_a_round_trip():
    flat, views = flat_group()
    before = [view.clone() for view in views]
    offload = HostOffload(lambda: views, CPU)  # the flat tensor is not even named

    offload.offload()
    gone = flat.untyped_storage().nbytes()
    offload.reload()
    views[0][0] = 7.0

    assert gone == 0
    assert torch.equal(views[1], before[1])
    assert flat[0] == 7.0  # still one memory


@pytest.mark.parametrize("size", [1, 8, 9])
def test_copies_in_pieces_are_whole(monkeypatch, size):
    monkeypatch.setattr(offload_module, "PIECE_BYTES", 8)
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
    before = tensor.clone()
    offload = HostOffload(lambda: [tensor], CPU)

    offload.offload()
    assert offload.bytes_away == size
    offload.reload()

    assert torch.equal(tensor, before)
    assert offload.bytes_away == 0


def test_what_is_kept_stays_and_may_leave_later():
    parameters, states = torch.ones(4), torch.ones(6)
    offload = HostOffload(lambda: [parameters, states], CPU)

    offload.offload(keep=[parameters])
    offload.check_here([parameters])
    with pytest.raises(RuntimeError, match=r"1 tensors of the model are in host memory: reload\(\)"):
        offload.check_here()
    offload.offload()

    assert offload.bytes_away == 40
    with pytest.raises(RuntimeError, match="in host memory"):
        offload.check_here([parameters])


def test_only_what_is_wanted_comes_back():
    parameters, states = torch.ones(4), torch.ones(6)
    offload = HostOffload(lambda: [parameters, states], CPU)
    offload.offload()

    offload.reload(only=[parameters])

    assert parameters.sum() == 4
    assert states.untyped_storage().nbytes() == 0


def test_leaving_and_coming_twice_is_leaving_and_coming_once():
    tensor = torch.ones(4)
    offload = HostOffload(lambda: [tensor], CPU)

    for step in (offload.reload, offload.offload, offload.offload, offload.reload, offload.reload):
        step()

    assert tensor.sum() == 4


def test_memory_of_somebody_else_is_let_be():
    array = torch.ones(3)
    array.numpy()[0] = 5  # shared with numpy from now on: it would read freed memory
    offload = HostOffload(lambda: [array], CPU)

    offload.offload()

    assert offload.bytes_away == 0
    assert array[0] == 5


def test_tensors_of_another_device_are_let_be():
    offload = HostOffload(lambda: [torch.ones(2, device="meta")], CPU)

    offload.offload()

    assert offload.bytes_away == 0


def test_a_module_is_its_parameters_shards_and_buffers():
    module = torch.nn.BatchNorm1d(2)
    module.weight.ds_tensor = torch.zeros(9)  # what ZeRO-3 leaves of a parameter on this rank

    found = {tuple(tensor.shape) for tensor in module_tensors(module)}

    assert found == {(2,), (9,), ()}  # weight, bias, means and variances; the shard; the number of batches


def test_states_gradients_and_buckets_of_an_engine_are_found():
    module = torch.nn.Linear(2, 3, bias=False)
    inner = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    inner.step()
    master, bucket = torch.zeros(7), torch.zeros(11)
    wrapper = SimpleNamespace(optimizer=inner, groups=[[master]], buckets={"fp32": Bucket(bucket)})

    found = list(engine_tensors(SimpleNamespace(module=module, optimizer=wrapper)))

    state = inner.state[module.weight]
    wanted = [module.weight, module.weight.grad, state["exp_avg"], state["exp_avg_sq"], master, bucket]
    assert {id(tensor.untyped_storage()) for tensor in wanted} <= {id(tensor.untyped_storage()) for tensor in found}
