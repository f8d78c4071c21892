"""Which curves a report shows: those that exist, of a run by rewards, a supervised run or a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.report.chart import Line, line_chart, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from markupsafe import Markup

    from rlhf_core.report.run_log import RunLog, Series

SPREAD = {"reward/mean": "reward/std"}  # drawn as a band around it

# (title, metrics of one unit, what it tells)
CURVES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Reward", ("reward/mean",), "mean over samples; the band is one standard deviation"),
    ("Score", ("reward/score_mean",), "mean of the unshaped scores"),
    ("Answer length", ("rollout/length_mean", "rollout/length_max"), "tokens that the policy spoke"),
    ("Truncated answers", ("rollout/truncated_share",), "share of the samples that hit a length limit"),
    ("Turns", ("rollout/turns_mean",), "times the policy spoke in an episode"),
    ("KL from the reference", ("kl/mean", "update/kl"), "nats a token"),
    ("KL coefficient", ("kl/coef",), "weight of the KL term"),
    ("Entropy", ("update/entropy",), "nats a token"),
    ("Policy change in the update", ("update/approx_kl",), "mean of -(logp - logp_old)"),
    ("Probability ratio", ("update/ratio_mean", "update/ratio_max"), "new over old, of the trained tokens"),
    (
        "Clipped and dropped tokens",
        ("update/clip_fraction", "update/capped_fraction", "update/dropped_fraction"),
        "share",
    ),
    (
        "Staleness",
        ("rollout/staleness_mean", "rollout/staleness_max"),
        "versions behind the policy that trains on a token",
    ),
    ("Mixed samples", ("rollout/mixed_share", "rollout/stale_share"), "share spoken by several, or by older, versions"),
    ("Trainer and engine disagree", ("mismatch/logprob_abs_mean", "update/mismatch"), "mean |Δ log-prob| of a token"),
    ("Largest disagreement", ("mismatch/logprob_abs_max",), "max |Δ log-prob| of a token"),
    ("Gradient norm", ("update/grad_norm", "train/grad_norm", "critic/grad_norm"), "before clipping"),
    ("Policy loss", ("update/policy_loss",), "mean over the optimizer steps"),
    ("Critic loss", ("critic/loss",), "mean over the optimizer steps"),
    ("Critic", ("critic/explained_variance",), "share of the variance of returns that values explain"),
    ("Values and returns", ("critic/value_mean", "critic/return_mean"), "means over tokens"),
    ("Training loss", ("train/loss",), "mean over the optimizer steps"),
    ("Training accuracy", ("train/accuracy",), "share of pairs ranked as the preference says"),
    ("Preferences", ("train/chosen_score", "train/rejected_score", "train/margin"), "of chosen and rejected answers"),
    ("Learning rate", ("update/lr", "critic/lr", "train/lr"), "of the last optimizer step"),
    ("Memory of a rank", ("update/memory_gib", "critic/memory_gib", "train/memory_gib"), "GiB"),
    ("Kept groups", ("filter/kept_share",), "share of the generated groups that filtering kept"),
    ("Rollout throughput", ("rollout/tokens_per_second",), "sampled tokens a second"),
)
FIRST = ("Reward", "Score", "Training loss")  # before the evaluations
# Of evaluations: what is no measure of the model.
NOT_MEASURES = ("seconds", "failed", "prompts", "stderr", "length_mean", "turns_mean", "examples", "tokens")


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart and what stands around it."""

    title: str
    told: str
    drawing: Markup
    legend: tuple[tuple[str, str], ...]  # (metric, its newest value), in the order of the colours


def curves_of(log: RunLog) -> tuple[list[Curve], list[tuple[str, str]]]:
    """What there is something to see of.

    Returns:
        (curves, metrics that had the same value all the time: name and value).
    """
    curves: list[Curve] = []
    constant: list[tuple[str, str]] = []
    iterations = list(_iterations(log.series))
    rewards = [pair for pair in iterations if pair[0].title in FIRST]
    for curve, lines in (*rewards, *_evaluations(log.series), *(pair for pair in iterations if pair not in rewards)):
        if all(len(line.values) > 1 and min(line.values) == max(line.values) for line in lines):
            constant += curve.legend
        else:
            curves.append(curve)
    return curves, constant


def _iterations(series: Mapping[str, Series]) -> Iterator[tuple[Curve, list[Line]]]:
    for title, names, told in CURVES:
        lines = [_line(series, name) for name in names if name in series]
        if lines:
            yield _curve(title, told, lines, "iteration"), lines


def _evaluations(series: Mapping[str, Series]) -> Iterator[tuple[Curve, list[Line]]]:
    names = [name for name in series if name.startswith("eval/") and not name.endswith(NOT_MEASURES)]
    whole = sorted(name for name in names if name.count("/") == 1)
    for title, chosen in (
        ("Held-out: success", [n for n in whole if "pass@" in n or "score" in n or "accuracy" in n][:4]),
        ("Held-out: reward", [n for n in whole if "reward" in n][:4]),
        ("Held-out: loss", [n for n in whole if "loss" in n][:4]),
    ):
        if chosen:
            lines = [_line(series, name) for name in chosen]
            yield _curve(title, "of a policy version, on what it is not trained on", lines, "version"), lines


def _line(series: Mapping[str, Series], name: str) -> Line:
    found, spread = series[name], series.get(SPREAD.get(name, ""))
    fits = spread is not None and spread.steps == found.steps
    return Line(name, found.steps, found.values, spread.values if spread is not None and fits else None)


def _curve(title: str, told: str, lines: list[Line], step: str) -> Curve:
    legend = tuple((line.label, number(line.values[-1])) for line in lines)
    return Curve(title, told, line_chart(title, lines, step), legend)
