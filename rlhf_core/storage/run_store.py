"""The log of one run: what lies where, what is complete, and that nothing is read that was not written.

::

    {root}/{run_id}/
      run.json                                 immutable
      finished.json                            the run has come to its end
      iterations/00000012/rollout/….arrow      parts: visible whole, and only counted once a manifest names them
      iterations/00000012/rollout.json         the manifest: written once and last; it *is* the stage's completion
      iterations/00000012/update.json          the same for the update, which has no parts
      iterations/00000012/rounds/00.json       what a round made of its groups, where a batch is filled in rounds
      checkpoints/v00000012/…                  checkpoints.CheckpointStore
      eval/v00000012.json, eval/v00000012/….arrow
      lease/00000007.json                      lease.Lease
      worlds/00000001.json                     worlds: the run went on with other processes
      attempts/00000001.json                   attempts: who worked on it, and how that ended
      iterations/00000012/sync.json            attempts: when the engines had what the iteration made
      images/{sha256}.png                      what the rows show: images
      latest.json, best.json                   pointers: the only documents that change

A part's name is its own claim: ``{rows}r-{tokens}t-{bytes}b-{sha256}.arrow``. So the parts of an attempt that died
before its manifest are found and verified without one, and a retry that makes the same rows makes the same object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import ConfigError, ConflictError, CorruptShardError, StorageError
from rlhf_core.records import Part, Round, Stage, StageManifest, StageRef
from rlhf_core.storage import images, shards
from rlhf_core.storage.digest import hashing, sha256_of
from rlhf_core.storage.documents import decode_document, encode_document
from rlhf_core.storage.object_store import ObjectStore
from rlhf_core.storage.paths import (
    ITERATION_NAME,
    PART_NAME,
    iteration_folder,
    manifest_path,
    round_path,
    stage_folder,
    version_name,
)
from rlhf_core.storage.shards import schema
from rlhf_core.storage.shards.tables import Encoded, decode_table
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import pyarrow as pa

    from rlhf_core.records import Experience, Trajectory
    from rlhf_core.storage.shards import RewardRow

logger = get_logger(__name__)

RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

Pointer = Literal["latest", "best"]


@dataclass(frozen=True)
class RunStore:
    """Everything a run writes and reads. Plain values only: it pickles, and may be used from any thread or process."""

    run_id: str
    root: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not RUN_ID.fullmatch(self.run_id) or self.run_id in (".", ".."):
            raise ConfigError(
                f"run_id {self.run_id!r} cannot name a folder: use 1 to 128 of the characters A-Z a-z 0-9 . _ -"
            )
        object.__setattr__(self, "root", ObjectStore(self.root).root)

    def neighbour(self, run_id: str, root: str | None) -> RunStore:
        """Another run: beside this one, or below another root.

        Options are those of one kind of file system: an endpoint of s3 means nothing to another.
        """
        other = RunStore(run_id, root or self.root, {}, self.timeout)
        alike = other.root.partition("://")[0] == self.root.partition("://")[0]
        return RunStore(run_id, other.root, self.options, self.timeout) if alike else other

    @property
    def objects(self) -> ObjectStore:
        """The store of this run's objects."""
        return ObjectStore(f"{self.root}/{self.run_id}", self.options, self.timeout)

    @property
    def url(self) -> str:
        """Where the run lies."""
        return self.objects.root

    def url_of(self, path: str) -> str:
        """The URL of one of its objects."""
        return self.objects.url(path)

    # --- the run itself

    def write_run(self, body: dict[str, Any]) -> None:
        """Write run.json; ``ConflictError`` if the run exists with another body."""
        self._create_document("run.json", body)

    def read_run(self) -> dict[str, Any] | None:
        """The body of run.json; None if the run does not exist."""
        return self._document("run.json")

    def write_end(self, version: int) -> None:
        """Record that the run is over, and the version it came to; ``ConflictError`` if it ended with another one."""
        self._create_document("finished.json", {"version": version})

    def read_end(self) -> int | None:
        """The version that the run ended with; None while it is not over."""
        body = self._document("finished.json")
        return None if body is None else int(body["version"])

    # --- parts

    def publish_trajectories(self, iteration: int, rows: Sequence[Trajectory], stage: Stage = Stage.ROLLOUT) -> Part:
        """Make trajectories durable as one part of the stage."""
        shard = shards.encode_trajectories(rows)
        return self._publish(stage_folder(iteration, stage), shard, len(rows), _tokens_of(rows))

    def publish_rewards(self, iteration: int, rows: Sequence[RewardRow], folder: str | None = None) -> Part:
        """Make reward results durable as one part of the reward stage, or of ``folder``; they have no tokens of their own."""
        folder = folder or stage_folder(iteration, Stage.REWARD)
        return self._publish(folder, shards.encode_rewards(rows), len(rows), 0)

    def publish_experience(self, iteration: int, rows: Sequence[Experience]) -> Part:
        """Make experience durable as one part of the experience stage."""
        shard = shards.encode_experience(rows)
        return self._publish(stage_folder(iteration, Stage.EXPERIENCE), shard, len(rows), _tokens_of(rows))

    def published_parts(self, iteration: int, stage: Stage, without: Collection[str] = ()) -> list[Part]:
        """Every whole part of the stage, named by a manifest or not: what an earlier attempt left.

        Each is read and hashed. A damaged one is left out with a warning: its rows are made again, under another name
        or over it. So are, unread, those at the paths ``without``.
        """
        return self.parts_in(stage_folder(iteration, stage), without)

    def parts_in(self, folder: str, without: Collection[str] = ()) -> list[Part]:
        """Every whole part of a folder, as ``published_parts``."""
        paths = [path for path in self.objects.list(folder) if path not in without]
        parts = [_part_from_name(path) for path in paths]
        return [part for part in parts if part is not None and self._is_whole(part)]

    def read_trajectories(self, parts: Sequence[Part]) -> list[Trajectory]:
        """The rows of the parts, in order.

        Raises:
            CorruptShardError: a part is missing, or its bytes, size or rows are not those recorded. It names the
            object.
        """
        return [row for part in parts for row in shards.trajectories_of(self.read_table(part, schema.TRAJECTORY))]

    def read_rewards(self, parts: Sequence[Part]) -> list[RewardRow]:
        """The rows of the parts, in order; errors as ``read_trajectories``."""
        return [row for part in parts for row in shards.rewards_of(self.read_table(part, schema.REWARD))]

    def read_experience(self, parts: Sequence[Part]) -> list[Experience]:
        """The rows of the parts, in order; errors as ``read_trajectories``."""
        return [row for part in parts for row in shards.experience_of(self.read_table(part, schema.EXPERIENCE))]

    def read_table(self, part: Part, expected: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
        """One part as an Arrow table, only ``columns`` of it where they are given.

        Raises:
            CorruptShardError: as ``read_trajectories``.
            StorageError: a newer version of this software wrote it.
        """
        data = self._bytes_of(part)
        with hashing(data) as digest:  # while they are decompressed: nobody sees the table before
            try:
                table = self.decode_part(part, data, expected, columns)
            except Exception:
                self._check_digest(part, digest.result())  # what is damaged is called so, not what it looks like
                raise
        self._check_digest(part, digest.result())
        return table

    def read_part(self, part: Part) -> memoryview:
        """The verified bytes of one part; errors as ``read_trajectories``."""
        data = self._bytes_of(part)
        self._check_digest(part, sha256_of(data))
        return data

    def decode_part(
        self, part: Part, data: memoryview, expected: pa.Schema, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """The bytes of one part as an Arrow table; errors as ``read_table``."""
        url = self.url_of(part.path)
        try:
            table = decode_table(data, expected, columns)
        except CorruptShardError as error:
            raise CorruptShardError(f"{url}: {error}") from error
        except StorageError as error:
            raise StorageError(f"{url}: {error}") from error
        if len(table) != part.rows:
            raise CorruptShardError(f"{url} has {len(table)} rows, recorded were {part.rows}")
        return table

    # --- images

    def put_image(self, png: bytes) -> str:
        """Make an image durable, once, and return its path: what ``ImageRef.uri`` names."""
        return images.put_image(self.objects, png)

    def get_image(self, uri: str) -> bytes:
        """The verified bytes of an image; ``CorruptShardError``, which names it, if it is missing or damaged."""
        return images.get_image(self.objects, uri)

    # --- manifests

    def commit(self, manifest: StageManifest) -> StageRef:
        """Complete a stage by writing its manifest, once.

        The first writer wins: if the stage is complete already, with this manifest or with another, the reference to
        the *existing* one is returned, and that one counts. So a stage may be run twice and is completed once.

        Raises:
            StorageError: the manifest names a part that is not there whole, names one twice, or belongs to another run.
        """
        self._check_committable(manifest)
        path = manifest_path(manifest.iteration, manifest.stage)
        try:
            self._create_document(path, manifest.to_json())
        except ConflictError:
            logger.warning("%s was complete already: its first manifest stays", self.url_of(path))
        committed = self.stage(manifest.iteration, manifest.stage)
        if committed is None:
            raise StorageError(
                f"{self.url_of(path)} vanished after it was written: something else deletes objects there"
            )
        return committed[1]

    def stage(self, iteration: int, stage: Stage) -> tuple[StageManifest, StageRef] | None:
        """The manifest of a complete stage and the reference to it; None if the stage is not complete.

        Raises:
            CorruptShardError: the manifest is damaged, or belongs to another run, iteration or stage.
        """
        path = manifest_path(iteration, stage)
        try:
            data = self.objects.read(path)
        except FileNotFoundError:
            return None
        manifest = self._manifest(data, path, iteration, stage)
        ref = StageRef(self.run_id, iteration, stage, path, sha256_of(data), manifest.rows, manifest.tokens)
        return manifest, ref

    def manifest_url(self, iteration: int, stage: Stage) -> str:
        """Where the stage's manifest lies, or will."""
        return self.url_of(manifest_path(iteration, stage))

    def read_manifest(self, ref: StageRef) -> StageManifest:
        """The manifest a reference points at; ``CorruptShardError`` if it is missing or not the one referred to."""
        url = self.url_of(ref.path)
        found = self.stage(ref.iteration, ref.stage)
        if found is None:
            raise CorruptShardError(f"{url} is missing: a reference with sha256 {ref.sha256} points at it")
        manifest, actual = found
        if actual != ref:
            raise CorruptShardError(f"{url} is not the manifest referred to: found {actual}, expected {ref}")
        return manifest

    def newest_update(self) -> tuple[int, StageManifest] | None:
        """The newest iteration whose update is complete, and that update's manifest."""
        for iteration in reversed(self.iterations()):
            found = self.stage(iteration, Stage.UPDATE)
            if found is not None:
                return iteration, found[0]
        return None

    def iterations(self) -> list[int]:
        """Every iteration that has begun, ascending."""
        return sorted(int(name) for name in self.objects.children("iterations") if ITERATION_NAME.fullmatch(name))

    def completed_iterations(self) -> list[int]:
        """Every iteration whose update is complete, ascending."""
        return [i for i in self.iterations() if self.objects.exists(manifest_path(i, Stage.UPDATE))]

    # --- rounds

    def record_round(self, played: Round) -> Round:
        """Record a round of an iteration, once; returns what is recorded: the first writer's."""
        path = round_path(played.iteration, played.number)
        try:
            self._create_document(path, played.to_json())
        except ConflictError:
            logger.warning("%s was recorded already: the first round stays", self.url_of(path))
        return self.round(played.iteration, played.number)

    def rounds(self, iteration: int) -> list[Round]:
        """The recorded rounds of an iteration, in order."""
        count = len(self.objects.children(f"{iteration_folder(iteration)}/rounds"))
        return [self.round(iteration, number) for number in range(count)]

    def round(self, iteration: int, number: int) -> Round:
        """A recorded round.

        Raises:
            CorruptShardError: it is missing or damaged, or belongs elsewhere.
        """
        path = round_path(iteration, number)
        url = self.url_of(path)
        body = self._document(path)
        if body is None:
            raise CorruptShardError(f"{url} is missing: the log of the run needs it")
        try:
            found = Round.from_json(body)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptShardError(f"{url} is no round: {error!r}") from error
        if (found.iteration, found.number) != (iteration, number):
            raise CorruptShardError(
                f"{url} is round {found.number} of iteration {found.iteration}: it does not belong there"
            )
        return found

    # --- evaluation

    def publish_eval_trajectories(self, version: int, rows: Sequence[Trajectory]) -> Part:
        """Make the trajectories of an evaluation durable."""
        return self._publish(
            f"eval/{version_name(version)}", shards.encode_trajectories(rows), len(rows), _tokens_of(rows)
        )

    def write_evaluation(self, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Record the evaluation of a policy version, once; returns what is recorded: the first writer's body."""
        path = f"eval/{version_name(version)}.json"
        try:
            self._create_document(path, body)
        except ConflictError:
            logger.warning("%s was recorded already: the first evaluation stays", self.url_of(path))
        return self._document(path) or {}

    def read_evaluation(self, version: int) -> dict[str, Any] | None:
        """The recorded evaluation of a policy version; None if there is none."""
        return self._document(f"eval/{version_name(version)}.json")

    # --- pointers

    def set_pointer(self, name: Pointer, body: dict[str, Any]) -> None:
        """Replace a pointer by one atomic act."""
        path = f"{name}.json"
        self.objects.put(path, encode_document(body, self.url_of(path)))

    def pointer(self, name: Pointer) -> dict[str, Any] | None:
        """The body of a pointer; None if it was never set."""
        return self._document(f"{name}.json")

    # --- inside

    def _publish(self, folder: str, shard: Encoded, rows: int, tokens: int) -> Part:
        size = len(shard.data)
        path = f"{folder}/{rows:06d}r-{tokens}t-{size}b-{shard.sha256}.arrow"
        self.objects.put(path, shard.data)
        return Part(path, rows, tokens, size, shard.sha256)

    def _bytes_of(self, part: Part) -> memoryview:
        """What lies at a part's path; of the right size, not verified."""
        url = self.url_of(part.path)
        try:
            data = self.objects.view(part.path)
        except FileNotFoundError as error:
            raise CorruptShardError(f"{url} is missing: a manifest names it with {part.rows} rows") from error
        if len(data) != part.bytes:
            raise CorruptShardError(
                f"{url} has {len(data)} bytes, recorded were {part.bytes}: it is truncated or altered"
            )
        return data

    def _check_digest(self, part: Part, found: str) -> None:
        if found != part.sha256:
            raise CorruptShardError(
                f"{self.url_of(part.path)} is damaged: its sha256 is {found}, recorded was {part.sha256}"
            )

    def _is_whole(self, part: Part) -> bool:
        try:
            self.read_part(part)
        except CorruptShardError as error:
            logger.warning("part left out: %s", error)
            return False
        return True

    def _check_committable(self, manifest: StageManifest) -> None:
        url = self.url_of(manifest_path(manifest.iteration, manifest.stage))
        if manifest.run_id != self.run_id:
            raise StorageError(f"{url}: a manifest of run {manifest.run_id!r} cannot be committed here")
        paths = [part.path for part in manifest.parts]
        if len(set(paths)) < len(paths):
            raise StorageError(f"{url}: a part is named twice: {sorted(p for p in set(paths) if paths.count(p) > 1)}")
        # Groups that waited lie in the folder of the iteration that sampled them.
        folders = sorted({part.path.rpartition("/")[0] for part in manifest.parts})
        for folder in folders:
            if not _may_name(manifest, folder):
                raise StorageError(
                    f"{url}: a part lies in {folder}: a manifest names parts of its own stage, of its or an earlier iteration"
                )
        present = {path: size for folder in folders for path, size in self.objects.sizes(folder).items()}
        for part in manifest.parts:
            if present.get(part.path) != part.bytes:
                raise StorageError(
                    f"{url}: part {part.path} is not there whole "
                    f"({present.get(part.path, 'no')} of {part.bytes} bytes); publish it first"
                )

    def _manifest(self, data: bytes, path: str, iteration: int, stage: Stage) -> StageManifest:
        url = self.url_of(path)
        body = decode_document(data, url)
        try:
            manifest = StageManifest.from_json(body)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptShardError(f"{url} is no stage manifest: {error!r}") from error
        found = (manifest.run_id, manifest.iteration, manifest.stage)
        if found != (self.run_id, iteration, stage):
            raise CorruptShardError(
                f"{url} is the manifest of run {found[0]!r} iteration {found[1]} stage {found[2]}: "
                "it does not belong there"
            )
        return manifest

    def _create_document(self, path: str, body: dict[str, Any]) -> None:
        self.objects.put_once(path, encode_document(body, self.url_of(path)))

    def _document(self, path: str) -> dict[str, Any] | None:
        try:
            data = self.objects.read(path)
        except FileNotFoundError:
            return None
        return decode_document(data, self.url_of(path))


def _may_name(manifest: StageManifest, folder: str) -> bool:
    found = re.fullmatch(rf"iterations/(\d{{8,}})/{manifest.stage.value}", folder)
    return found is not None and int(found[1]) <= manifest.iteration


def _part_from_name(path: str) -> Part | None:
    claim = PART_NAME.fullmatch(path.rsplit("/", 1)[-1])
    if claim is None:
        logger.warning("%s is no part of a run: left out", path)
        return None
    return Part(path, int(claim["rows"]), int(claim["tokens"]), int(claim["bytes"]), claim["sha256"])


def _tokens_of(rows: Sequence[Trajectory] | Sequence[Experience]) -> int:
    return sum(len(row.token_ids) for row in rows)
