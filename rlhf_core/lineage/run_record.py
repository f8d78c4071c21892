"""What a run's log says of how each of its versions was made: every iteration, its manifests, its shards.

Only documents are read, in parallel; shards are named, not opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from rlhf_core.config.differences import differences
from rlhf_core.config.model import Config
from rlhf_core.config.supervised import SupervisedConfig
from rlhf_core.errors import StorageError
from rlhf_core.records import Round, Stage, StageManifest
from rlhf_core.storage import CheckpointStore, FileEntry, read_worlds, trajectories
from rlhf_core.storage.audit.contents import documents
from rlhf_core.storage.digest import sha256_of
from rlhf_core.storage.find_run import BY_REWARDS
from rlhf_core.storage.paths import MANIFEST, ROUND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.records import Part
    from rlhf_core.storage import RunStore, World
    from rlhf_core.storage.audit.contents import Document


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage of an iteration, or a round of it."""

    name: str  # of the stage; rounds/00 …
    manifest: str  # path of its document
    sha256: str  # of the document
    rows: int
    tokens: int
    parts: tuple[Part, ...]
    inputs: dict[str, str]  # stage -> sha256 of the manifest it was made from
    source: dict[str, Any] | None  # the manifest of another run that it was taken over from
    user_code: dict[str, str]  # the user's Python files that were loaded -> sha256


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """How one version became the next."""

    iteration: int
    stages: tuple[StageRecord, ...]
    rounds: tuple[StageRecord, ...]
    prompts: dict[str, Any]  # where its draw began and ended, how many; ``ids`` where they were asked for
    weights: dict[str, str]  # digests of the version it made; empty while it is not over


@dataclass(frozen=True, slots=True)
class SavedVersion:
    """The files of one version."""

    version: int
    url: str
    weights: dict[str, str]  # digests
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run, up to one of its versions."""

    run_id: str
    url: str
    kind: str
    created_at: str
    version: int  # what follows is what made it
    seed: int | None
    config: dict[str, Any]  # ``sha256``; ``changed``: what differs from the defaults; ``values``: all
    data: dict[str, Any]  # the plan: prompts or examples, dropped, fingerprint
    code: dict[str, Any]
    packages: dict[str, str]
    user_code: dict[str, str]  # as the run was started with
    code_changes: tuple[dict[str, Any], ...]  # ``iteration``, ``stage`` and ``user_code`` from there on
    replay: dict[str, Any] | None
    checkpoint: SavedVersion | None
    iterations: tuple[IterationRecord, ...] = field(default=())
    problems: tuple[str, ...] = ()  # documents that cannot be read
    worlds: tuple[World, ...] = ()  # its processes, and since which version; empty: they never changed


def run_record(store: RunStore, body: Mapping[str, Any], version: int | None = None, *, ids: bool = False) -> RunRecord:
    """Read the log of a run.

    Args:
        store: of the run.
        body: of run.json.
        version: only what made this one; default: the newest.
        ids: read the ids of the prompts from the shards, too.

    Raises:
        CorruptShardError: of shards, with ``ids``.
    """
    found, problems = _documents(store, version)
    iterations = tuple(_iteration(store, number, read, ids) for number, read in sorted(found.items()))
    newest = max((record.iteration + 1 for record in iterations if record.weights), default=0)
    reached = newest if version is None else version
    checkpoint = _checkpoint(store, reached, problems)
    started_with = dict(body.get("user_code", {}))
    return RunRecord(
        run_id=store.run_id,
        url=store.url,
        kind=body.get("kind", BY_REWARDS),
        created_at=body["created_at"],
        version=reached,
        seed=body.get("seed"),
        config=_config(body),
        data=dict(body["plan"]),
        code=dict(body.get("code", {})),
        packages=dict(body.get("packages", {})),
        user_code=started_with,
        code_changes=tuple(_code_changes(started_with, iterations)),
        replay=body.get("replay"),
        checkpoint=checkpoint,
        iterations=iterations,
        problems=tuple(problems),
        worlds=tuple(world for world in read_worlds(store) if world.since <= reached),
    )


def _documents(store: RunStore, version: int | None) -> tuple[dict[int, list[Document]], list[str]]:
    """Those of each iteration, and what is wrong with others."""
    found: dict[int, list[Document]] = {}
    problems: list[str] = []
    wanted = []
    for path in store.objects.list("iterations"):
        place = MANIFEST.fullmatch(path) or ROUND.fullmatch(path)
        if place is not None and (version is None or int(place[1]) < version):
            wanted.append(path)
    for document in documents(store, wanted):
        if document.body is None:
            problems.append(str(document.fault))
        else:
            found.setdefault(int(document.path.split("/")[1]), []).append(document)
    return found, problems


def _iteration(store: RunStore, iteration: int, read: list[Document], ids: bool) -> IterationRecord:
    bodies = {document.path.rpartition("/")[2]: document for document in read if MANIFEST.fullmatch(document.path)}
    stages = [_stage(bodies[f"{stage}.json"]) for stage in Stage if f"{stage}.json" in bodies]
    rounds = [_round(document) for document in read if ROUND.fullmatch(document.path)]
    rollout, update = (_body_of(bodies.get(f"{stage}.json")) for stage in (Stage.ROLLOUT, Stage.UPDATE))
    prompts: dict[str, Any] = {name: rollout[name] for name in ("cursor_in", "cursor_out", "drawn") if name in rollout}
    if ids and rollout:
        named = trajectories(store, iteration, columns=["prompt_id"])["prompt_id"].to_pylist()
        prompts["ids"] = list(dict.fromkeys(named))
    weights = {name: value for name, value in update.items() if name.endswith("digest")}
    return IterationRecord(iteration, tuple(stages), tuple(rounds), prompts, weights)


def _stage(document: Document) -> StageRecord:
    assert document.body is not None, "only readable documents are asked"
    manifest = StageManifest.from_json(document.body)
    return StageRecord(
        name=str(manifest.stage),
        manifest=document.path,
        sha256=sha256_of(document.data),
        rows=manifest.rows,
        tokens=manifest.tokens,
        parts=manifest.parts,
        inputs=manifest.inputs,
        source=manifest.body.get("source"),
        user_code=manifest.body.get("user_code", {}),
    )


def _round(document: Document) -> StageRecord:
    assert document.body is not None, "only readable documents are asked"
    played = Round.from_json(document.body)
    return StageRecord(
        name=f"rounds/{played.number:02d}",
        manifest=document.path,
        sha256=sha256_of(document.data),
        rows=sum(part.rows for part in played.parts),
        tokens=sum(part.tokens for part in played.parts),
        parts=(*played.parts, *played.reward_parts),
        inputs={},
        source=None,
        user_code=played.user_code,
    )


def _body_of(document: Document | None) -> dict[str, Any]:
    return {} if document is None or document.body is None else document.body["body"]


def _checkpoint(store: RunStore, version: int, problems: list[str]) -> SavedVersion | None:
    checkpoints = CheckpointStore(store)
    try:
        body = checkpoints.get(version) if version else None
    except StorageError as error:
        problems.append(str(error))
        return None
    if body is None:
        return None
    weights = {name: value for name, value in body.items() if name.endswith("digest")}
    files = tuple(
        FileEntry(**entry) for entry in body["files"]
    )  # as recorded: whether they are there is another question
    return SavedVersion(version, checkpoints.url(version), weights, files)


def _config(body: Mapping[str, Any]) -> dict[str, Any]:
    values = body["config"]
    schema = Config if body.get("kind", BY_REWARDS) == BY_REWARDS else SupervisedConfig
    changed = differences(_defaults(schema), values)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {
        "sha256": sha256_of(text.encode()),
        "changed": {key: new for key, (_, new) in sorted(changed.items()) if new is not None},
        "values": values,
    }


def _defaults(schema: type[BaseModel]) -> dict[str, Any]:
    """Of every key that has one."""
    found: dict[str, Any] = {}
    for name, info in schema.model_fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):  # a section may have other defaults than its class: the critic's AdamW
            found[name] = default.model_dump(mode="json")
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found[name] = _defaults(info.annotation)
        elif default is not PydanticUndefined:
            found[name] = to_jsonable_python(default)
    return found


def _code_changes(before: dict[str, str], iterations: tuple[IterationRecord, ...]) -> list[dict[str, Any]]:
    """Where the user's files became others, in the order of the log."""
    changes: list[dict[str, Any]] = []
    for record in iterations:
        for stage in (*record.rounds, *record.stages):
            if stage.user_code and stage.user_code != before:
                before = stage.user_code
                changes.append({"iteration": record.iteration, "stage": stage.name, "user_code": before})
    return changes
