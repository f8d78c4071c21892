"""Champion and challenger of a turn: the numbers, and how people read them.

Both are versions of the turn's own run, which evaluates what it starts from, the champion, and what it ends with, on the same
held-out prompts and with the same seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.algorithms.paired import Paired, paired
from rlhf_core.errors import RunFailedError, StorageError
from rlhf_core.storage import stored_best
from tasks.report import artifact_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config import RetrainConfig
    from rlhf_core.storage.retrain_log import TurnRecord
    from tasks.retraining import Retraining

VALUES = {"eval/score_mean": "scores", "eval/reward_mean": "rewards"}  # metric -> of an evaluation's outcomes


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a decision is made by."""

    metric: str
    champion: str  # as the configuration names it
    challenger: str
    challenger_version: int  # policy version of the turn's run
    left_out: int  # prompts on which one of them has no value
    numbers: Paired
    better: bool  # by what is asked for
    sentence: str  # all of it in words


def compared(retraining: Retraining, turn: TurnRecord) -> Comparison:
    """By what the turn's finished run has recorded.

    Raises:
        StorageError: an evaluation is missing, or the two are of different prompts.
        RunFailedError: there is no prompt on which both have a value.
    """
    store, config = retraining.run_store(turn), retraining.config
    best = stored_best(store) if retraining.training.ckpt.best_metric_key is not None else None
    version = best.version if best is not None else store.read_end()
    assert version is not None, "the run is over"
    old, new = (_values(store.read_evaluation(v), config.metric, f"version {v} of {store.url}") for v in (0, version))
    if old.keys() != new.keys():
        raise StorageError(
            f"{store.url}: versions 0 and {version} were evaluated on different prompts: eval.dataset changed during the run; "
            "give the turn up (rlhf retrain -c FILE --abandon) and let the next one compare"
        )
    known = [(a, b) for a, b in ((old[prompt], new[prompt]) for prompt in old) if a is not None and b is not None]
    if not known:
        raise RunFailedError(
            f"{store.url}: versions 0 and {version} have {config.metric} on no held-out prompt in common"
        )
    numbers = paired([a for a, _ in known], [b for _, b in known])
    better = numbers.clears(config.margin, config.standard_errors)
    return Comparison(
        metric=config.metric,
        champion=turn.start,
        challenger=f"run:{turn.run_id}@{version}",
        challenger_version=version,
        left_out=len(old) - len(known),
        numbers=numbers,
        better=better,
        sentence=_sentence(config, numbers, better),
    )


def question(retraining: Retraining, turn: TurnRecord, comparison: Comparison) -> str:
    """What a human is asked before a promotion."""
    table = _table(comparison.champion, comparison.challenger, comparison.metric, comparison.numbers)
    heading = f"# Promote turn {turn.number} of {retraining.config.name}?"
    samples = f"Answers of both are in the artifact `{artifact_key(turn.run_id, 'evaluation')}`."
    return "\n".join([heading, "", *table, "", f"{comparison.sentence}.", "", samples])


def decision_markdown(name: str, body: Mapping[str, Any], url: str | None) -> str:
    """A decision, as its artifact shows it."""
    lines = [
        f"# {name}, turn {body['turn']}: {body['verdict']}",
        "",
        f"{body['reason']}.",
        "",
        *_table(body["champion"]["model"], body["challenger"]["model"], body["metric"], Paired(**body["numbers"])),
    ]
    if body["left_out"]:
        lines += ["", f"{body['left_out']} prompts are left out: an answer failed, or has no score."]
    if url is not None:
        lines += ["", f"[Registered model]({url})"]
    return "\n".join([*lines, ""])


def _values(evaluation: Mapping[str, Any] | None, metric: str, what: str) -> dict[tuple[str, str], float | None]:
    """The mean over the samples of each held-out prompt, by its row id and text; None without any."""
    if evaluation is None or not evaluation.get("outcomes"):
        raise StorageError(f"{what} has no evaluation with the outcome of each prompt: it cannot be compared")
    found: dict[tuple[str, str], float | None] = {}
    for outcome in evaluation["outcomes"]:
        samples = [value for value in outcome[VALUES[metric]] if value is not None]
        found[outcome["prompt"], outcome["text_sha256"]] = sum(samples) / len(samples) if samples else None
    return found


def _sentence(config: RetrainConfig, numbers: Paired, better: bool) -> str:
    """Both numbers, and what was asked of them."""
    errors = f" and {config.standard_errors:g} standard errors" if config.standard_errors else ""
    wanted = f"margin {config.margin:g}{errors} {'met' if better else 'not met'}"
    return (
        f"{config.metric} {numbers.challenger:.4g} against the champion's {numbers.champion:.4g}: "
        f"{_difference(numbers, '.3g')} on {numbers.prompts} prompts, {wanted}"
    )


def _table(champion: str, challenger: str, metric: str, numbers: Paired) -> Sequence[str]:
    return [
        f"| | {metric} | better on | model |",
        "|---|---:|---:|---|",
        f"| champion | {numbers.champion:.4f} | {numbers.worse} prompts | `{champion}` |",
        f"| challenger | {numbers.challenger:.4f} | {numbers.better} prompts | `{challenger}` |",
        f"| difference | {_difference(numbers, '.4f')} | of {numbers.prompts} | mean ± its standard error |",
    ]


def _difference(numbers: Paired, form: str) -> str:
    error = "" if numbers.standard_error is None else f" ± {numbers.standard_error:{form}}"
    return f"{numbers.difference:+.4f}{error}"
