"""Iterations of a run done again from its log, and what comes out compared with what was recorded.

::

    source   checkpoint, updates up to I ─┐      rollout, reward I ─┐
                                       adopted                   adopted (or scored anew)
                                          ▼                         ▼
    scratch                          version I ─────────────▶ advantage ─▶ update ─▶ compare ─▶ I + 1 …

The scratch run is a replay with the source's own configuration, in a folder of its own which is removed afterwards. The
source is only read.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from prefect import task
from prefect.artifacts import acreate_table_artifact

from rlhf_core.cluster.actor_session import DIGEST
from rlhf_core.cluster.context import open_store
from rlhf_core.cluster.replay import check_done, find_source, new_replay, storage_for
from rlhf_core.cluster.session import CRITIC_DIGEST
from rlhf_core.config.differences import differences
from rlhf_core.config.replay import replay_config
from rlhf_core.errors import ConfigError
from rlhf_core.lineage import code_revision, machine, package_versions, user_code
from rlhf_core.records import Stage
from rlhf_core.storage import ObjectStore, RunStore, adopt_newest_checkpoint, adopt_stage, holder, read_worlds
from rlhf_core.storage.documents import encode_document
from tasks.opening import run_document
from tasks.options import TASK_OPTIONS
from tasks.plan import RunPlan
from tasks.report import artifact_key
from tasks.run import current_run
from tasks.worlds import in_newest_world

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import Config
    from rlhf_core.records import Experience, StageManifest
    from rlhf_core.storage import RewardRow
    from tasks.run import OpenRun

Verdict = Literal["same", "different", "recorded", "not reached"]
ARRAYS = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")
NUMBERS = ("reward", "shaped_reward")
MARKER = "scratch.json"  # of a scratch run: written first, and nothing without it is removed


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where iterations are done again."""

    run_id: str
    config: Config
    iterations: range

    @property
    def store(self) -> RunStore:
        """Its log."""
        return open_store(self.config, self.run_id)


@dataclass(frozen=True, slots=True)
class Redone:
    """An iteration, done again."""

    iteration: int
    rewards: Verdict  # recorded: they were taken from the log, not scored again
    experience: Verdict
    weights: Verdict
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A plain JSON object."""
        return asdict(self)


def make_scratch(
    source: RunStore, run_id: str, iterations: tuple[int, int], root: str | None, *, score: bool
) -> Scratch:
    """A run whose log says that everything before the first of ``iterations`` is done, exactly as in the source.

    Args:
        source: the run's log.
        run_id: of the scratch run.
        iterations: first and last.
        root: where it shall lie; default: beside the source.
        score: answers are scored again, too; else the recorded rewards are taken.

    Raises:
        ConfigError: the source has not done these iterations.
        CorruptShardError: what it recorded is damaged.
    """
    body, sampled_with = find_source(source)
    first, last = iterations
    check_done(source, first, last)
    if score and sampled_with.fills_batches and sampled_with.reward.normalize_enable:
        raise ConfigError(
            f"{source.url} normalised its rewards (reward.normalize_enable) over groups of other batches too, which are not "
            "scored again: reproduce it with the recorded rewards"
        )
    body = _as_then(source, body, first, last)
    as_it_was = f"algo.advantage.is_correction_enable={str(sampled_with.corrects_mismatch).lower()}"
    rewards = f"replay.rewards={'anew' if score else 'source'}"
    config = replay_config(body, source.url, storage_for(source, root), [as_it_was, rewards], (0, last))
    scratch = open_store(config, run_id)
    _clear(scratch)
    scratch.objects.put_once(MARKER, encode_document({"reproduces": source.url}, scratch.url_of(MARKER)))
    try:
        _adopt_log(scratch, source, first)
        pinned, _ = new_replay(config, run_id)
        # The batches are those that were trained, whatever would be made of their scores now.
        trained = replace(pinned, filters_anew=False)
        document = {**run_document(config, run_id, RunPlan(**body["plan"]), None), "replay": trained.to_json()}
        kept: dict[str, Any] = {key: body[key] for key in ("cpu_threads", "vision") if key in body}
        scratch.write_run({"cpu_threads": None, **document, **kept})
    except BaseException:
        _clear(scratch)
        raise
    return Scratch(run_id, config, range(first, last + 1))


def _adopt_log(scratch: RunStore, source: RunStore, first: int) -> None:
    """Everything that iteration ``first`` begins with."""
    base = adopt_newest_checkpoint(scratch, source, first)
    for iteration in range(base, first):
        adopt_stage(scratch, source, iteration, Stage.EXPERIENCE)
        adopt_stage(scratch, source, iteration, Stage.UPDATE)
    if first:
        for stage in Stage:  # where the data, the running means and the ledger stood
            adopt_stage(scratch, source, first - 1, stage)


def discard(scratch: Scratch) -> None:
    """Remove the scratch run, and all that is in it."""
    _clear(scratch.store)


def _as_then(source: RunStore, body: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """run.json as if the run had always had the processes that made these iterations."""
    worlds = read_worlds(source)
    made_in = [world for world in worlds if world.since <= first]
    if not made_in:
        return body
    other = next((w for w in worlds if first < w.since <= last and not w.same_as(made_in[-1])), None)
    if other is not None:
        raise ConfigError(
            f"{source.url} went on with other processes from iteration {other.since}: reproduce {first}..{other.since - 1} and "
            f"{other.since}..{last} one after the other"
        )
    return {**body, "config": in_newest_world(body["config"], made_in), "cpu_threads": made_in[-1].cpu_threads}


def _clear(scratch: RunStore) -> None:
    """Remove a scratch run, whole or half made; ``ConfigError`` where something else lies, or somebody works on it."""
    if not scratch.objects.exists(MARKER):
        if scratch.objects.children():
            raise ConfigError(f"{scratch.url} exists, and is no scratch run: choose another run_id")
        return
    held = holder(scratch)
    if held is not None and not held.is_free:
        raise ConfigError(f"{scratch.url} is under way in {held.owner}: let it end, or choose another run_id")
    ObjectStore(scratch.root, scratch.options, scratch.timeout).remove_folder(scratch.run_id)


@task(name="compare", task_run_name="compare {iteration}", **TASK_OPTIONS)
async def compare(run_id: str, iteration: int) -> dict[str, Any]:
    """What came out of an iteration, against what the source recorded of it."""
    return (await asyncio.to_thread(_compare, current_run(run_id), iteration)).to_json()


def environment(source: RunStore) -> list[str]:
    """What is not as it was when the run was started: code, the user's files, packages, machine. Empty if all is."""
    body = source.read_run() or {}
    now: dict[str, Any] = {"code": code_revision(), "packages": package_versions(), "machine": machine()}
    if "user_code" in body:
        now["user_code"] = user_code(body["config"])
    then: dict[str, Any] = {name: body[name] for name in now if name in body}
    changed = differences(then, {name: now[name] for name in then})
    return [f"{key}: {before!r} then, {after!r} now" for key, (before, after) in sorted(changed.items())]


def _compare(run: OpenRun, iteration: int) -> Redone:
    assert run.replay is not None, "a scratch run is a replay"
    source, own = run.replay.source, run.store
    notes: list[str] = []
    rewards: Verdict = "recorded"
    if run.config.scores:
        rewards = _verdict(_different_rewards(source, own, iteration), notes)
    theirs, ours = _manifest(source, iteration, Stage.EXPERIENCE), _manifest(own, iteration, Stage.EXPERIENCE)
    digests = [[part.sha256 for part in manifest.parts] for manifest in (theirs, ours)]
    same = digests[0] == digests[1]
    experience = _verdict(
        None if same else different_experience(source.read_experience(theirs.parts), own.read_experience(ours.parts)),
        notes,
    )
    theirs, ours = _manifest(source, iteration, Stage.UPDATE), _manifest(own, iteration, Stage.UPDATE)
    weights = _verdict(_different_weights(theirs, ours), notes)
    return Redone(iteration, rewards, experience, weights, notes)


def _verdict(difference: str | None, notes: list[str]) -> Verdict:
    if difference is None:
        return "same"
    notes.append(difference)
    return "different"


def _manifest(store: RunStore, iteration: int, stage: Stage) -> StageManifest:
    found = store.stage(iteration, stage)
    assert found is not None, "both runs have done the iteration"
    return found[0]


def _different_rewards(source: RunStore, own: RunStore, iteration: int) -> str | None:
    """Only samples of the batch count: others were not scored again."""
    theirs, ours = [
        {
            (row.group_id, row.sample_index): row
            for row in store.read_rewards(_manifest(store, iteration, Stage.REWARD).parts)
        }
        for store in (source, own)
    ]
    different = [key for key, row in ours.items() if key not in theirs or not _alike(row, theirs[key])]
    if not different:
        return None
    group, sample = different[0]
    before, after = theirs.get(different[0]), ours[different[0]]
    return (
        f"{len(different)} of {len(ours)} rewards differ, such as of group {group} sample {sample}: "
        f"{before.result.reward if before else None!r} then, {after.result.reward!r} now"
    )


def _alike(one: RewardRow, other: RewardRow) -> bool:
    return (one.result.reward, one.result.score, one.result.status) == (
        other.result.reward,
        other.result.score,
        other.result.status,
    )


def different_experience(theirs: Sequence[Experience], ours: Sequence[Experience]) -> str:
    """Which columns differ, and by how much."""
    before, after = [{(r.group_id, r.sample_index, r.segment_index): r for r in rows} for rows in (theirs, ours)]
    if before.keys() != after.keys():
        only = sorted(before.keys() ^ after.keys())
        return f"experience: {len(before)} rows then, {len(after)} now; in one of them only: {only[:3]}"
    largest: dict[str, float] = {}
    for key, row in before.items():
        for name in (*ARRAYS, *NUMBERS):
            one, other = getattr(row, name), getattr(after[key], name)
            if (one is None) != (other is None):
                largest[name] = float("inf")
            elif one is not None:
                by = float(np.max(np.abs(np.subtract(one, other, dtype=np.float64)), initial=0.0))
                largest[name] = max(largest.get(name, 0.0), by)
    listed = ", ".join(f"{name} by up to {by:.3g}" for name, by in largest.items() if by > 0)
    return f"experience: {listed or 'the rows are the same, their order or encoding is not'}"


def _different_weights(theirs: StageManifest, ours: StageManifest) -> str | None:
    different = [key for key in (DIGEST, CRITIC_DIGEST) if theirs.body.get(key) != ours.body.get(key)]
    if not different:
        return None
    listed = ", ".join(
        f"{'critic' if key == CRITIC_DIGEST else 'policy'} {theirs.body[key][:12]} then, {ours.body[key][:12]} now"
        for key in different
    )
    return f"weights: {listed}"


def not_reached(iterations: Sequence[int], reason: str) -> list[dict[str, Any]]:
    """Iterations that could not be done again because of what came before."""
    first = Redone(iterations[0], "not reached", "not reached", "not reached", [reason])
    rest = [Redone(i, "not reached", "not reached", "not reached") for i in iterations[1:]]
    return [redone.to_json() for redone in (first, *rest)]


async def report_reproduction(source: RunStore, redone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the flow returns, and a table of it in the UI.

    Returns:
        ``source``; ``same``, whether nothing differs; ``iterations``, of ``compare``; ``changed_since``, where something
        differs: what is not as it was when the run was started.
    """
    same = all(row[name] in ("same", "recorded") for row in redone for name in ("rewards", "experience", "weights"))
    changed = [] if same else await asyncio.to_thread(environment, source)
    await acreate_table_artifact(
        key=artifact_key(source.run_id, "reproduced"),
        table=[{**row, "notes": "; ".join(row["notes"])} for row in redone],
        description="\n\n".join([f"Iterations of run {source.run_id}, done again", *changed]),
    )
    return {"source": source.url, "same": same, "iterations": list(redone), "changed_since": changed}
