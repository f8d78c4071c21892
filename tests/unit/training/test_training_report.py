from __future__ import annotations

import math

import pytest
import torch
from torch import distributed

from rlhf_core.training.objective import SUMS
from rlhf_core.training.ranks import RankInfo
from rlhf_core.training.report import update_report
from rlhf_core.training.step import LossPart, StepsTally, StepTally


@pytest.fixture
def alone():
    """This process as the only rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def part(loss=0.0, ratio_max=1.0, **sums):
    values = torch.tensor([sums.get(name, 0.0) for name in SUMS], dtype=torch.float64)
    return LossPart(torch.tensor(loss), values, {"ratio": torch.tensor(ratio_max)})


def step_of(*parts):
    tally = StepTally(SUMS, torch.device("cpu"))
    for item in parts:
        tally.add(item)
    return tally


def test_means_are_over_tokens_of_applied_steps():
    tally = StepsTally(SUMS)
    tally.add(step_of(part(policy_loss=1, tokens=1, entropy=2, compared=1, mismatch=3, ratio_max=2.0)), grad_norm=4)
    tally.add(step_of(part(policy_loss=2, tokens=3, entropy=2, compared=1, mismatch=1)), grad_norm=2)
    tally.add(step_of(part(policy_loss=9, tokens=9)), grad_norm=None)

    report = update_report(tally, lr=0.1, seconds=1.0, has_reference=False)

    assert (report.policy_loss, report.entropy, report.mismatch, report.grad_norm) == (1.5, 1, 2, 3)
    assert (report.ratio_max, report.num_tokens, report.applied_steps, report.skipped_steps) == (2, 4, 2, 1)


def test_kl_is_left_out_without_a_reference():
    tally = StepsTally(SUMS)
    tally.add(step_of(part(tokens=2, kl=1)), grad_norm=1)

    assert update_report(tally, lr=0.1, seconds=1, has_reference=True).metrics()["kl"] == 0.5
    assert "kl" not in update_report(tally, lr=0.1, seconds=1, has_reference=False).metrics()


def test_update_of_nothing_reports_only_its_counts():
    metrics = update_report(StepsTally(SUMS), lr=0.1, seconds=1, has_reference=True).metrics()

    assert metrics == {"lr": 0.1, "num_tokens": 0, "applied_steps": 0, "skipped_steps": 0, "seconds": 1}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_loss_that_is_not_finite_marks_the_step(alone, bad):
    assert step_of(part(1.0), part(2.0)).reduce()
    assert not step_of(part(bad), part(2.0)).reduce()


@pytest.mark.parametrize(("device", "backend", "name"), [("cpu", "gloo", "cpu"), ("gpu", "nccl", "cuda:3")])
def test_rank_knows_its_backend_and_device(device, backend, name):
    rank = RankInfo(5, 8, 3, "127.0.0.1", 29500, device)

    assert (rank.backend, str(rank.torch_device)) == (backend, name)


@pytest.mark.parametrize(("has_reference", "kl"), [(True, {"kl/mean": 0.5}), (False, {})])
def test_an_update_that_asks_first_says_what_the_advantages_would(has_reference, kl):
    """Weights 1 and 3 in two steps."""
    tally = StepsTally(SUMS)
    for weight, peak in ((1.0, 0.0), (3.0, math.log(3))):
        step = part(tokens=1, kl=0.5, weight=weight, weight_squared=weight**2, log_weight_abs=peak)
        step.peaks["log_weight_abs"] = torch.tensor(peak)
        tally.add(step_of(step), grad_norm=1)

    told = update_report(tally, lr=0.1, seconds=1, has_reference=has_reference, reuses_logprobs=True)
    known = update_report(tally, lr=0.1, seconds=1, has_reference=has_reference)

    assert told.advantage_metrics() == pytest.approx(
        {
            "mismatch/logprob_abs_mean": math.log(3) / 2,
            "mismatch/logprob_abs_max": math.log(3),
            "mismatch/effective_share": 0.8,
        }
        | kl
    )
    assert known.advantage_metrics() == {}
    assert told.metrics() == known.metrics()


def test_an_update_that_changed_nothing_has_measured_nothing():
    report = update_report(StepsTally(SUMS), lr=0.1, seconds=1, has_reference=True, reuses_logprobs=True)

    assert report.advantage_metrics() == {}


def test_the_largest_of_all_parts_and_steps_counts(alone):
    steps = StepsTally(SUMS)
    for ratios in ((1.0, 4.0, 2.0), (3.0,)):
        step = step_of(*(part(ratio_max=ratio) for ratio in ratios))
        assert step.reduce()
        steps.add(step, grad_norm=1)

    assert steps.peaks == {"ratio": 4.0}
