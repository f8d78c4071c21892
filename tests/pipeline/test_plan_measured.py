"""What `rlhf plan` says a rank holds, and what DeepSpeed's own tensors hold."""

import pytest
import training_cases as cases

from rlhf_core.planning.memory import Training, optimizer_bytes
from rlhf_core.planning.shape import shape_of

pytestmark = pytest.mark.pipeline


def held(rank, model, overrides):
    """After an update: bytes of master weights and moments, and of the parameters of the model, of this rank."""
    from rlhf_core.training.fragments import inner_optimizer

    trainer = cases.make_trainer(rank, model, overrides)
    trainer.update(cases.experiences(), 0)
    module = list(trainer.engine.module.parameters())
    inner = inner_optimizer(trainer.engine.optimizer)
    # ZeRO-3 lends its master weights to the optimizer for a step only.
    masters = getattr(trainer.engine.optimizer, "fp32_partitioned_groups_flat", None) or [
        p for group in inner.param_groups for p in group["params"] if not any(p is known for known in module)
    ]
    moments = [value for state in inner.state.values() for name, value in state.items() if name.startswith("exp_avg")]
    parameters = [getattr(p, "ds_tensor", p) for p in module]
    return tuple(sum(t.numel() * t.element_size() for t in tensors) for tensors in ([*masters, *moments], parameters))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_of_two_ranks(two_ranks, tiny_model, stage, dtype):
    shape = shape_of(str(tiny_model))
    how = Training(2, stage, dtype, tokens=64, longest=32, chunk=32)

    found = two_ranks.run(held, str(tiny_model), [f"ds.zero_stage={stage}", f"ds.param_dtype={dtype}"])

    states, parameters = (sum(rank[i] for rank in found) for i in (0, 1))
    copies = 1 if stage else 2  # without ZeRO each rank has all of it
    assert states / copies == pytest.approx(optimizer_bytes(shape, how), rel=0.01)
    weights = {"fp32": 4, "bf16": 2}[dtype] * shape.parameters
    assert parameters == pytest.approx(weights if stage == 3 else 2 * weights, rel=0.01)
