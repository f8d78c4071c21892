"""Who used a run: others below the same root, by what their run.json says of their models and their data.

Runs elsewhere are not known here: a run knows what it was made from, not what was made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import RlhfError
from rlhf_core.lineage.ancestry import TRAINING
from rlhf_core.storage import ObjectStore, RunStore
from rlhf_core.storage.find_run import BY_REWARDS
from rlhf_core.storage.parallel import in_parallel
from rlhf_core.storage.retrain_log import RetrainLog
from rlhf_core.storage.run_store import RUN_ID

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_NEIGHBOURS = 500  # that are looked at, the last by name
READERS = 8


@dataclass(frozen=True, slots=True)
class Use:
    """One run, or one turn of a retraining, that used another."""

    by: str
    kind: str  # in words
    what: str  # of the run that was used


def uses_of(store: RunStore) -> list[Use]:
    """Of the run, by its neighbours."""
    beside = ObjectStore(store.root, store.options, store.timeout)
    names = [name for name in beside.children() if RUN_ID.fullmatch(name) and name != store.run_id]

    def read(name: str) -> list[Use]:
        neighbour = store.neighbour(name, None)
        try:
            body = neighbour.read_run()
            return list(_of_run(store, name, body) if body is not None else _of_retraining(store, neighbour))
        except (RlhfError, KeyError):  # damaged, or something else than a run
            return []

    return [use for found in in_parallel(read, names[-MOST_NEIGHBOURS:], READERS) for use in found]


def _of_run(store: RunStore, name: str, body: Mapping[str, Any]) -> Iterator[Use]:
    kind = TRAINING.get(body.get("kind", BY_REWARDS), "run")
    roles: dict[str, list[str]] = {}
    for role, model in (body.get("models") or {}).items():
        if str(model.get("url", "")).startswith(f"{store.url}/"):
            roles.setdefault(f"version {model['version']}", []).append(role)
    for version, listed in roles.items():
        yield Use(name, kind, f"{version} as {', '.join(listed)}")
    replay = body.get("replay")
    if replay and replay["source_url"] == store.url:
        yield Use(name, "replay", f"trajectories of iterations {replay['iterations'][0]} to {replay['iterations'][1]}")
    for made in (body.get("exports") or {}).values():
        if made["source_url"] == store.url:
            yield Use(name, f"{kind} on an export", f"iterations {made['iterations'][0]} to {made['iterations'][1]}")


def _of_retraining(store: RunStore, neighbour: RunStore) -> Iterator[Use]:
    log = RetrainLog(neighbour)
    for number in log.numbers():
        if log.turn(number).run_id == store.run_id:
            verdict = (log.decision(number) or {}).get("verdict", "not decided yet")
            yield Use(neighbour.run_id, f"retraining, turn {number}", str(verdict))
