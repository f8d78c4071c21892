"""What the log of every run must say, whatever its algorithm, mode and pipeline.

::

    plan       as many iterations as the prompts make, or fewer where groups are filtered; each with all its stages
    versions   update k makes version k + 1; nothing that is trained in it was spoken by a version before k - rollout.max_age
               (async: Q; sync: 0), or after k
    prompts    each is trained once, or filtered once, or failed once; none is left over: the ledger's law, counted again
               from the shards
    numbers    finite; where version k alone spoke, and is trained, engine and trainer agree on its log-probs: so the engine
               had the weights of the version that it named
    order      sync: rollout k + 1 begins after update k
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config import parse_config
from rlhf_core.records import Ledger, Stage

if TYPE_CHECKING:
    from rlhf_core.config import Config
    from rlhf_core.records import Experience, StageManifest, Trajectory
    from rlhf_core.storage import RunStore


SAME_LOGPROB = 1e-3  # fp32, two implementations


@dataclass(frozen=True)
class Measured:
    """What a run was like."""

    iterations: int
    rows: int  # that were trained
    max_lag: int  # versions between the policy that spoke a token and the one that it trained
    mixed_rows: int  # that more than one version spoke
    filtered: int  # groups
    unfinished: int  # groups that iterations left in flight to the next
    overlaps: int  # rollouts that began before the update of the iteration before them had ended


class Log:
    """The log of a finished run."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.run: dict[str, Any] = store.read_run()
        self.config: Config = parse_config(self.run["config"])
        self.iterations = store.completed_iterations()

    def manifest(self, iteration: int, stage: Stage) -> StageManifest:
        found = self.store.stage(iteration, stage)
        assert found is not None, f"iteration {iteration} has no {stage} manifest"
        return found[0]

    def body(self, iteration: int, stage: Stage) -> dict[str, Any]:
        return self.manifest(iteration, stage).body

    def trained(self, iteration: int) -> list[Trajectory]:
        """The rows behind the experience of an iteration."""
        keys = {_key(row) for row in self.experience(iteration)}
        rows = self.store.read_trajectories(self.manifest(iteration, Stage.ROLLOUT).parts)
        found = {row.key: row for row in rows if row.key in keys}
        assert found.keys() == keys, "experience without its trajectory"
        return list(found.values())

    def experience(self, iteration: int) -> list[Experience]:
        """What it was trained on."""
        return self.store.read_experience(self.manifest(iteration, Stage.EXPERIENCE).parts)


def check(store: RunStore) -> Measured:
    """All of it."""
    log = Log(store)
    _plan(log)
    _updates(log)
    _prompts(log)
    _numbers(log)
    return Measured(
        iterations=len(log.iterations),
        rows=sum(log.manifest(k, Stage.EXPERIENCE).rows for k in log.iterations),
        max_lag=_versions(log),
        mixed_rows=sum(
            len({span.version for span in row.version_spans}) > 1 for k in log.iterations for row in log.trained(k)
        ),
        filtered=_total(log).filtered,
        unfinished=sum(len(log.body(k, Stage.ROLLOUT).get("unfinished", ())) for k in log.iterations),
        overlaps=_order(log),
    )


def _plan(log: Log) -> None:
    planned = log.run["plan"]["iterations"]
    count = len(log.iterations)
    assert log.iterations == list(range(count))
    assert count == planned or (log.config.algo.dynamic_filtering_enable and 0 < count <= planned)
    assert log.store.iterations() == log.iterations, "an iteration was begun and not finished"
    assert log.store.read_end() == count


def _updates(log: Log) -> None:
    steps = [log.body(k, Stage.UPDATE)["optimizer_steps"] for k in log.iterations]
    digests = [log.body(k, Stage.UPDATE)["digest"] for k in log.iterations]
    norms = [log.body(k, Stage.UPDATE)["metrics"]["update/grad_norm"] for k in log.iterations]
    assert [log.body(k, Stage.UPDATE)["version"] for k in log.iterations] == [k + 1 for k in log.iterations]
    assert all(a < b for a, b in pairwise([0, *steps]))
    moved = [before != after for before, after in pairwise(digests)]
    assert all(has_moved or norm == 0 for has_moved, norm in zip(moved, norms[1:], strict=True)), (
        "an update changed nothing"
    )
    ends = [_end(log.body(k, Stage.UPDATE)) for k in log.iterations]
    assert all(before <= log.body(k + 1, Stage.UPDATE)["started_at"] for k, before in enumerate(ends[:-1]))


def _prompts(log: Log) -> None:
    accounts = [Ledger(**log.body(k, Stage.EXPERIENCE)["ledger"]) for k in log.iterations]
    assert all(account.balanced for account in accounts)
    assert all(after.carried == before.buffered for before, after in pairwise(accounts))
    total, prompts = _total(log), log.run["plan"]["prompts"]
    assert (total.balanced, total.drawn, total.buffered) == (True, prompts, 0)

    trained = [group for k in log.iterations for group in sorted({row.group_id for row in log.experience(k)})]
    rounds = [played for k in log.iterations for played in log.store.rounds(k)]
    verdicts: dict[str, str] = {}
    for played in rounds:
        verdicts.update(played.verdicts)  # of one that was sampled again: the last
    dropped = [group for group, verdict in verdicts.items() if verdict != "kept"]
    assert len(trained) == total.trained
    assert len(dropped) == total.filtered + total.failed == total.filtered, "a sample failed"
    assert sorted([*trained, *dropped]) == [f"0000-{offset:08d}" for offset in range(prompts)]


def _numbers(log: Log) -> None:
    for k in log.iterations:
        current = {row.key for row in log.trained(k) if {span.version for span in row.version_spans} == {k}}
        metrics = log.body(k, Stage.UPDATE)["metrics"]
        if log.config.reuses_logprobs and len(current) == len(log.trained(k)):
            assert metrics["mismatch/logprob_abs_max"] < SAME_LOGPROB
        for row in log.experience(k):
            given = (row.rollout_logprobs, row.old_logprobs, row.ref_logprobs, row.values, row.advantages, row.returns)
            assert all(np.isfinite(values).all() for values in given if values is not None)
            assert np.isfinite((row.reward, row.shaped_reward)).all()
            assert (row.old_logprobs is None) == log.config.reuses_logprobs
            if row.old_logprobs is not None and _key(row) in current:
                assert np.abs(row.old_logprobs - row.rollout_logprobs).max() < SAME_LOGPROB
            assert (row.values is not None) == log.config.needs_critic
            assert (row.ref_logprobs is not None) == log.config.needs_reference
        assert np.isfinite(list(metrics.values())).all()


def _versions(log: Log) -> int:
    """The largest lag."""
    oldest, limit = 0, log.config.max_age or 0  # None: only what is sampled ahead may be old, and here it has a limit
    for k in log.iterations:
        for row in log.trained(k):
            spoken = [span for span in row.version_spans if span.end > span.start]
            assert sum(end - start for start, end, _ in spoken) == row.num_actions, "a token without its version"
            lags = [k - version for _, _, version in spoken]
            assert 0 <= min(lags) <= max(lags) <= limit, f"iteration {k}, row {row.key}: {spoken}"
            assert [span.version for span in spoken] == sorted(span.version for span in spoken), (
                "an older version came later"
            )
            oldest = max(oldest, *lags)
    return oldest


def _order(log: Log) -> int:
    """Rollouts that ran while the iteration before them was trained."""
    begun = [log.body(k, Stage.ROLLOUT)["started_at"] for k in log.iterations]
    over = [_end(log.body(k, Stage.UPDATE)) for k in log.iterations]
    early = sum(start < end for start, end in zip(begun[1:], over, strict=False))
    assert early == 0 or log.config.overlaps
    return early


def _key(row: Experience) -> tuple[str, int, int]:
    return row.group_id, row.sample_index, row.segment_index


def _total(log: Log) -> Ledger:
    return Ledger(**log.body(log.iterations[-1], Stage.EXPERIENCE)["ledger_total"])


def _end(body: dict[str, Any]) -> float:
    return float(body["started_at"] + body["seconds"])
