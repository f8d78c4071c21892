"""The whole way from a model back to base models: which run made it, from which shards, and the same of every run behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config.model_spec import EXPORT
from rlhf_core.errors import StorageError
from rlhf_core.lineage.ancestry import TRAJECTORIES, ModelOrigin, RunOrigin, ancestry
from rlhf_core.lineage.run_record import RunRecord, run_record
from rlhf_core.storage import CheckpointStore
from rlhf_core.storage.checkpoints import digest_of

if TYPE_CHECKING:
    from rlhf_core.lineage.target import Target
    from rlhf_core.storage import RunStore


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of a run, or of one version of it."""

    origin: RunOrigin  # the tree of runs
    records: dict[str, RunRecord]  # URL of each run in it -> how the version that was used was made
    version: int | None  # that was asked for; None: the run as a whole

    @property
    def record(self) -> RunRecord:
        """Of the run that was asked for."""
        return self.records[self.origin.url]

    def to_json(self) -> dict[str, Any]:
        """The tree, and beside it ``version`` and ``runs``: the record of each run by its URL."""
        runs = {url: asdict(record) for url, record in self.records.items()}
        return {**asdict(self.origin), "version": self.record.version, "runs": runs}


def account(target: Target, *, ids: bool = False) -> Account:
    """Read the logs of a run and of all behind it.

    Args:
        target: a run, or a version of it.
        ids: read the ids of its prompts from its shards, too.
    """
    origin = ancestry(target.store)
    assert origin is not None, "a target is a run that exists"
    records = {}
    for url, (run, version) in runs_behind(origin, target.version).items():
        store = target.store.neighbour(run.run_id, url.rpartition("/")[0])
        body = store.read_run()
        assert body is not None, "the tree holds runs that exist"
        records[url] = run_record(store, body, version, ids=ids and url == origin.url)
    return Account(origin, records, target.version)


def runs_behind(origin: RunOrigin, version: int | None = None) -> dict[str, tuple[RunOrigin, int | None]]:
    """URL -> the run, and the newest of its versions that was used; nearest first. None: it as a whole."""
    found: dict[str, tuple[RunOrigin, int | None]] = {}
    waiting = [(origin, version)]
    while waiting:
        run, used = waiting.pop(0)
        if run.url not in found:
            waiting += [(model.run, _used(model)) for model in run.models if model.run is not None]
            found[run.url] = (run, used)
        else:
            known = found[run.url][1]
            found[run.url] = (run, None if known is None or used is None else max(known, used))
    return found


def _used(model: ModelOrigin) -> int | None:
    """The version of a run that another needed; of trajectories, whose log may go on: all of it."""
    return None if model.roles == (TRAJECTORIES,) else model.version


def broken_links(store: RunStore, origin: RunOrigin) -> list[str]:
    """What a run, or one behind it, used and is not there any more, or is another one now; in words."""
    found = []
    for run, _ in runs_behind(origin).values():
        for model in run.models:
            problem = model.problem or _altered(store, model)
            if problem is not None:
                found.append(f"{', '.join(model.roles)} of {run.run_id}: {model.spec} ({model.url}): {problem}")
    return found


def _altered(store: RunStore, model: ModelOrigin) -> str | None:
    """What of the exported model is not what the run loaded, in words."""
    if model.run is None or model.version is None:
        return None
    checkpoints = CheckpointStore(store.neighbour(model.run.run_id, model.run.url.rpartition("/")[0]))
    try:
        files = checkpoints.files(model.version, EXPORT)
    except StorageError as error:
        return str(error)
    return None if digest_of(files) == model.digest else "it holds another model than when it was used"
