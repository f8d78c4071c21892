"""Models under DeepSpeed that leave their device for host memory between the stages of an iteration, as colocated runs do."""

import numpy as np
import pytest
import training_cases as cases

pytestmark = pytest.mark.pipeline

TWO_RANKS = ["actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2"]
MUON = ["actor.optim=muon", "actor.max_norm=1"]


@pytest.mark.parametrize(
    "settings",
    [
        *([f"ds.zero_stage={stage}", "ds.param_dtype=bf16"] for stage in (0, 1, 2, 3)),
        ["ds.zero_stage=2", "ds.param_dtype=fp32"],
        *([f"ds.zero_stage={stage}", "ds.param_dtype=bf16", *MUON] for stage in (2, 3)),
    ],
    ids=" ".join,
)
def test_turns_change_no_bit(two_ranks, tiny_model, settings):
    batches = [cases.experiences(seed=seed) for seed in range(3)]
    straight = two_ranks.run(cases.updates, str(tiny_model), batches, [*TWO_RANKS, *settings])

    turns = two_ranks.run(cases.taking_turns, str(tiny_model), batches, [*TWO_RANKS, *settings])

    for (digests, _, away), (_, expected) in zip(turns, straight, strict=True):
        assert digests == expected
        assert away[-1] > away[0] > 0  # optimizer states are there after the first update


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reference_kept_in_host_memory_scores_as_another(two_ranks, tiny_model, stage):
    rows, settings = cases.experiences(), [*TWO_RANKS, f"ds.zero_stage={stage}", "ds.param_dtype=bf16"]
    expected = two_ranks.run(cases.reference_logprobs, str(tiny_model), rows, settings)

    offloaded = two_ranks.run(cases.reference_between_passes, str(tiny_model), rows, settings)

    for (passes, away), once in zip(offloaded, expected, strict=True):
        assert all(np.array_equal(found[i], once[i]) for found in passes for i in once)
        assert min(away) > 0  # how much differs: ZeRO-3 keeps small parameters whole after a pass, or not
