"""Models that runs of this project made, named as ``run:ID@best`` (config.model_spec).

::

    controller   spec ─── pin ───▶ exact version, digest ─▶ run.json ─▶ every worker        once, when the run starts
    worker       pinned ─ fetch ─▶ the checkpoint's hf/ files below the model cache         verified, whole or not at all

A name such as "best" means another checkpoint tomorrow. So it is looked up once, and what was found is recorded: a resumed run
uses the same bits, whatever the source run did meanwhile.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.model_spec import EXPORT, is_run_model, parse_run_model
from rlhf_core.errors import ConfigError, CorruptShardError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rlhf_core.config import Config
    from rlhf_core.config.model import StorageConfig
    from rlhf_core.config.model_spec import RunModel
    from rlhf_core.config.supervised import Method, SupervisedConfig
    from rlhf_core.storage import CheckpointStore


@dataclass(frozen=True, slots=True)
class PinnedCheckpoint:
    """One checkpoint of a run, exactly. Plain values: it pickles."""

    checkpoints: CheckpointStore  # of the run
    version: int
    digest: str  # of the exported files: their names and their sha256

    @property
    def run_id(self) -> str:
        """The run that made it."""
        return self.checkpoints.run_store.run_id

    @property
    def url(self) -> str:
        """Where it lies."""
        return self.checkpoints.url(self.version)


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A model that a run uses: a name that means the same everywhere, or a checkpoint."""

    spec: str  # as the configuration has it
    checkpoint: PinnedCheckpoint | None = None

    @property
    def origin(self) -> str:
        """The checkpoint's URL, or the name: what lineage shows."""
        return self.spec if self.checkpoint is None else self.checkpoint.url

    def to_json(self) -> dict[str, Any]:
        """As run.json has it: ``spec`` and, of a checkpoint, ``run``, ``version``, ``digest`` and ``url``."""
        if self.checkpoint is None:
            return {"spec": self.spec}
        pinned = self.checkpoint
        return {
            "spec": self.spec,
            "run": pinned.run_id,
            "version": pinned.version,
            "digest": pinned.digest,
            "url": pinned.url,
        }


def models_of(config: Config) -> dict[str, str]:
    """The models a run by rewards loads: role -> name."""
    policy, reward = config.actor.model_name_or_path, config.reward.model_name_or_path
    models = {"policy": policy}
    if config.needs_reference:
        models["reference"] = config.ref.model_name_or_path or policy
    if config.needs_critic:
        models["critic"] = config.critic.model_name_or_path or reward or policy
    if reward is not None:
        models["reward"] = reward
    return models


def supervised_models_of(config: SupervisedConfig, method: Method) -> dict[str, str]:
    """The models a supervised run loads: role -> name."""
    policy = config.model.model_name_or_path
    if method != "dpo":
        return {"policy": policy}
    return {"policy": policy, "reference": config.dpo.ref_model_name_or_path or policy}


def pin_models(
    specs: Mapping[str, str], storage: StorageConfig, recorded: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, PinnedModel]:
    """Every role's model, exactly: as ``recorded`` in run.json, else as the name means now.

    Args:
        specs: role -> name, of ``models_of``.
        storage: of the configuration: where runs without a URL lie, and how they are reached.
        recorded: ``models`` of run.json, when the run goes on.

    Raises:
        ConfigError: a name means nothing (see ``pin``).
    """
    recorded = recorded or {}
    # Each name once: two roles with one name have one model, also while its run goes on.
    found = {spec: pin(spec, storage) for spec in sorted({s for role, s in specs.items() if role not in recorded})}
    return {
        role: _recalled(recorded[role], storage) if role in recorded else found[spec] for role, spec in specs.items()
    }


def pin(spec: str, storage: StorageConfig) -> PinnedModel:
    """What a name means now.

    Raises:
        ConfigError: it is malformed; or there is no such run, no such complete checkpoint, or no model in it.
    """
    from rlhf_core.storage.checkpoints import digest_of  # pyarrow, which importing this package must not load

    if not is_run_model(spec):
        return PinnedModel(spec)
    wanted = parse_run_model(spec)
    checkpoints = _checkpoints_of(wanted, storage)
    url = checkpoints.run_store.url
    if checkpoints.run_store.read_run() is None:
        raise ConfigError(f"{spec}: there is no run at {url}: check its id and storage.root, or give the run's URL")
    version = _version_of(wanted, checkpoints)
    try:
        files = checkpoints.files(version, EXPORT)
    except CorruptShardError as error:
        raise ConfigError(
            f"{spec}: {url} has no complete checkpoint of version {version}; it has "
            f"{', '.join(map(str, checkpoints.versions())) or 'none'} (see its ckpt.save_steps, ckpt.max_num and ckpt.max_mem)"
        ) from error
    if not files:
        raise ConfigError(
            f"{spec}: {checkpoints.url(version)} holds no exported model (that run had ckpt.save_hf=false): choose another run"
        )
    return PinnedModel(spec, PinnedCheckpoint(checkpoints, version, digest_of(files)))


def fetch(pinned: PinnedCheckpoint, cache: Path) -> Path:
    """A folder of this machine with the checkpoint's exported model. Read it only.

    It lies below ``cache``, named by run, version and digest, and appears whole or not at all. Processes that want it at once
    wait for the first of them. A store on the same disk shares its files' blocks with it; they stay when the source is rotated
    away.

    Raises:
        ConfigError: the checkpoint is gone, or another one is in its place.
        CorruptShardError: a file is not the one recorded. It names the object.
    """
    folder = Path(cache) / f"run-{pinned.run_id}-v{pinned.version:08d}-{pinned.digest[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            _download(pinned, folder)
    return folder


def _checkpoints_of(wanted: RunModel, storage: StorageConfig) -> CheckpointStore:
    from rlhf_core.storage import CheckpointStore, RunStore  # pyarrow, which importing this package must not load

    beside = RunStore(wanted.run_id, storage.root, dict(storage.options), storage.timeout)
    return CheckpointStore(beside.neighbour(wanted.run_id, wanted.root))


def _version_of(wanted: RunModel, checkpoints: CheckpointStore) -> int:
    """The version a name means now."""
    from rlhf_core.storage import stored_best

    url = checkpoints.run_store.url
    if wanted.which == "best":
        best = stored_best(checkpoints.run_store)
        if best is None:
            raise ConfigError(
                f"{wanted.spec}: {url} has no best checkpoint: it has no ckpt.best_metric_key, or was not evaluated yet; name "
                "a version, or the newest with @latest"
            )
        return best.version
    if wanted.which == "latest":
        newest = checkpoints.newest()
        if newest is None:
            raise ConfigError(f"{wanted.spec}: {url} has no complete checkpoint yet: wait for its first one")
        return newest[0]
    return wanted.which


def _recalled(body: Mapping[str, Any], storage: StorageConfig) -> PinnedModel:
    """The inverse of ``PinnedModel.to_json``. A run without a URL is looked for below today's ``storage.root``."""
    spec = str(body["spec"])
    if "version" not in body:
        return PinnedModel(spec)
    checkpoints = _checkpoints_of(parse_run_model(spec), storage)
    return PinnedModel(spec, PinnedCheckpoint(checkpoints, int(body["version"]), str(body["digest"])))


def _download(pinned: PinnedCheckpoint, folder: Path) -> None:
    """Make ``folder``. The lock is held: what other attempts left is nobody's."""
    from rlhf_core.storage.checkpoints import digest_of

    checkpoints = pinned.checkpoints
    if checkpoints.get(pinned.version) is None:
        raise ConfigError(
            f"{pinned.url}, which this run uses, is gone: it was rotated away (ckpt.max_num, ckpt.max_mem) or deleted; start a "
            "new run from another checkpoint"
        )
    if digest_of(checkpoints.files(pinned.version, EXPORT)) != pinned.digest:
        raise ConfigError(
            f"{pinned.url} holds another model than when this run started: its run was made anew; start a new run from it"
        )
    for left in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        checkpoints.download(pinned.version, draft, EXPORT, link=True)
        draft.chmod(0o755)  # mkdtemp makes it private
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else: another machine, on a cache that they share without locks, was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock among the processes of this machine; the kernel frees it when its holder dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
