"""Universal checkpoints between real ranks: another number of them, and another ZeRO stage, go on from the same numbers.

write     one update ─▶ saved ─▶ another update: the run that never changed
go on     a new trainer ─▶ loads ─▶ saves again: the same numbers ─▶ the other update: the same step
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_cases as cases

from rlhf_core.errors import TrainingError

pytestmark = pytest.mark.pipeline

FP32, BF16 = (), ("ds.param_dtype=bf16",)
MUON = ("actor.optim=muon", "actor.max_norm=1", "actor.muon.lr=0.02")
COMMON = ("ds.use_universal_ckpt=true", "train.enable_ema=true", "train.ema_beta=0.9", "actor.lr_scheduler=linear")
EVERY_STAGE = [(ranks, stage) for ranks in (1, 2) for stage in range(4)]
# Every pair of stages both from one rank to two and back; and the same ranks and stage.
PAIRS = [
    (source, target) for source in EVERY_STAGE for target in EVERY_STAGE if source[0] != target[0] or source == target
]


@dataclass
class Written:
    """A checkpoint, and the run that wrote it."""

    folder: Path
    digest: str  # of the weights that it holds
    end: dict[str, Any]  # weights one update later
    step: dict[str, Any]  # of that update


@pytest.fixture(scope="module")
def run_on(one_rank, two_ranks):
    return lambda ranks, *arguments: {1: one_rank, 2: two_ranks}[ranks].run(*arguments)


@pytest.fixture(scope="module")
def written(run_on, tiny_model, tmp_path_factory):
    """(ranks, stage, more overrides) to a checkpoint: each is written once."""

    @cache
    def write(ranks, stage, overrides):
        folder = tmp_path_factory.mktemp("universal")
        digest, before, end = run_on(ranks, save_on_the_way, str(tiny_model), settings(stage, overrides), folder)[0]
        return Written(folder, digest, end, {name: end[name] - before[name] for name in end})

    return write


def settings(stage, overrides):
    return [f"ds.zero_stage={stage}", *COMMON, *overrides]


def save_on_the_way(rank, model, overrides, folder):
    trainer = cases.make_trainer(rank, model, overrides)
    trainer.update(cases.experiences(seed=0), 0)
    trainer.save(folder)
    digest, before = trainer.weight_digest(), weights_of(trainer)
    trainer.update(cases.experiences(seed=1), 1)
    return digest, before, weights_of(trainer)


def go_on(rank, model, overrides, folder, again):
    trainer = cases.make_trainer(rank, model, overrides)
    trainer.load(folder)
    digest, counts = trainer.weight_digest(), (trainer.version, trainer.optimizer_steps)
    trainer.save(again)
    trainer.update(cases.experiences(seed=1), 1)
    return digest, counts, weights_of(trainer)


def refusal(rank, model, overrides, folder):
    try:
        cases.make_trainer(rank, model, overrides).load(folder)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it was loaded")


def weights_of(trainer):
    from rlhf_core.training.weights import master_weights

    masters = master_weights(trainer.hf_model, trainer.engine.optimizer)
    return {name: weight.detach().cpu().float().numpy().copy() for name, weight in masters}


def numbers(folder):
    """Everything that is saved of the parameters, whole, whichever ranks wrote it."""
    from rlhf_core.training.universal import SavedNumbers

    found = {}
    for file in sorted(folder.glob("ema_rank*.pt")):
        found.update({(name, "ema"): average for name, average in torch.load(file).items()})
    with SavedNumbers(folder / "universal") as saved:
        for name in saved.parameters:
            for kind in saved.kinds(name):
                length = 1 if kind == "step" else found[name, "ema"].numel()
                found[name, kind] = saved.elements(name, kind, 0, length, length)
    return found


def check(written, run_on, tiny_model, again, source, target, overrides):
    saved = written(*source, overrides)
    ranks, stage = target

    answers = run_on(ranks, go_on, str(tiny_model), settings(stage, overrides), saved.folder, again)

    before, after = numbers(saved.folder), numbers(again)
    assert before.keys() == after.keys()
    assert {kind for _, kind in before} >= {"fp32", "ema"} | ({"momentum_buffer"} if MUON[0] in overrides else set())
    assert {kind for name, kind in before if "embed" in name} == {"fp32", "ema", "exp_avg", "exp_avg_sq", "step"}
    for key, value in before.items():
        assert torch.equal(value.float(), after[key].float()), key
    for digest, counts, _ in answers:
        assert (digest, counts) == (saved.digest, (1, 1))
    return saved, answers[0][2]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_ranks_and_stage_go_on_from_any_others(written, run_on, tiny_model, tmp_path, source, target):
    """The same ranks and stage: bit for bit. Others add up in another order."""
    saved, end = check(written, run_on, tiny_model, tmp_path, source, target, FP32)

    for name, weight in end.items():
        limit = 0.0 if source == target else 1e-6 * np.linalg.norm(saved.end[name])
        assert np.linalg.norm(weight - saved.end[name]) <= limit, name


# Each stage, and each number of ranks, is one that is left and one that is entered; two are kept.
CROSSINGS = [
    ((1, 0), (2, 3)),
    ((1, 1), (2, 2)),
    ((2, 2), (1, 0)),
    ((2, 3), (1, 1)),
    ((2, 2), (2, 2)),
    ((2, 1), (2, 1)),
]


@pytest.mark.parametrize(("overrides", "limit"), [(BF16, 0.05), (MUON, 1e-3), ((*MUON, *BF16), 0.5)])
@pytest.mark.parametrize(("source", "target"), CROSSINGS)
def test_masters_and_momentum_cross_too(written, run_on, tiny_model, tmp_path, source, target, overrides, limit):
    """bf16 gradients differ with the order of their sums, and Muon makes small directions of them large."""
    saved, end = check(written, run_on, tiny_model, tmp_path, source, target, overrides)

    for name, weight in end.items():
        difference = np.linalg.norm(weight - saved.end[name])
        assert difference <= (0.0 if source == target else limit * np.linalg.norm(saved.step[name])), name


def test_a_checkpoint_that_is_not_universal_says_what_would_have_been(one_rank, two_ranks, tiny_model, tmp_path):
    one_rank.run(save_on_the_way, str(tiny_model), [*settings(2, FP32), "ds.use_universal_ckpt=false"], tmp_path)

    ranks, _ = two_ranks.run(refusal, str(tiny_model), settings(2, FP32), tmp_path)
    [stage] = one_rank.run(refusal, str(tiny_model), settings(3, FP32), tmp_path)

    assert "was written with world_size=1, this run has 2: restore the ranks of this model" in ranks
    assert (
        "was written with zero_stage=2, this run has 3: restore ds.zero_stage; only checkpoints written with" in stage
    )
    assert "ds.use_universal_ckpt=true fit another one" in ranks
