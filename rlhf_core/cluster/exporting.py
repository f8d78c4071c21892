"""An export from beginning to end: the run, the tokenizer of its policy, the dataset, and what it was made from.

Needs no Ray: it reads shards, decodes, and writes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rlhf_core.config import parse_config
from rlhf_core.config.iteration_range import within
from rlhf_core.data import load_tokenizer, models_of, pin_models, resolve_model
from rlhf_core.data.export import write_examples, write_samples
from rlhf_core.data.export_choice import Choice, Format, Selection
from rlhf_core.data.said import Speech
from rlhf_core.errors import ConfigError
from rlhf_core.lineage import code_revision
from rlhf_core.records import Stage
from rlhf_core.storage.exports.output import Output, file_digests
from rlhf_core.storage.exports.row_files import SUFFIXES
from rlhf_core.storage.find_run import check_has_trajectories, find_run
from rlhf_core.storage.rescored import Rescoring, existing_rescoring

if TYPE_CHECKING:
    from rlhf_core.config import Config
    from rlhf_core.data.choosing import Pairing, Ties
    from rlhf_core.storage import RunStore

OF_FORMAT = {"best": "sft", "ties": "sft", "min_reward": "sft", "pairs": "dpo", "margin": "dpo"}


@dataclass(frozen=True)
class ExportRequest:
    """What is asked for; None: not said."""

    run: str  # id below ``root``, or URL
    format: Format
    output: str  # path or URL; ``.jsonl`` or ``.parquet``, of hf a folder
    iterations: str | None = None  # ``I..J``; default: all
    where: str | None = None
    rescored: str | None = None  # name of rewards that count instead of the run's own
    best: int | None = None
    ties: Ties | None = None
    min_reward: float | None = None
    pairs: Pairing | None = None
    margin: float | None = None
    plain_prompts: bool = False
    overwrite: bool = False
    root: str | None = None
    storage_options: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # of the run's and the output's file system


def export(request: ExportRequest) -> dict[str, Any]:
    """Write a dataset and, beside it, what it was made from. Returns that, as JSON.

    Raises:
        ConfigError: what is asked for does not fit together, or is not there; the output is there already.
        DataError: nothing is left to export.
        CorruptShardError: a shard is missing or damaged.
        StorageError: the output cannot be written. Nothing of it is published then.
    """
    _check_options(request)
    store = find_run(request.run, request.root, request.storage_options)
    body = check_has_trajectories(store)
    config = parse_config(body["config"], source=store.url_of("run.json"))
    output = Output(request.output, request.storage_options)
    output.check_free(request.overwrite)
    rescoring = None if request.rescored is None else existing_rescoring(store, request.rescored)
    choice = _choice(request, _iterations(store, rescoring, request.iterations))
    selection = Selection(store, choice, rescoring)
    with output.staging() as staging:
        staged = staging / f"dataset{_suffix(request)}"
        if choice.format == "hf":
            write_samples(selection, staged)
        else:
            speech = _speech(config, store, body)
            write_examples(selection, speech, config.data.apply_chat_template, staged)
        provenance = {
            "format": choice.format,
            "source": {"run_id": store.run_id, "url": store.url},
            "rescored": request.rescored,
            "manifests": _manifests(store, rescoring, choice),
            "choice": {**asdict(choice), "iterations": list(choice.iterations)},
            "files": file_digests(staged),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "code": code_revision(),
            **selection.tally.to_json(),
        }
        output.publish(staged, provenance)
    return {**provenance, "output": output.place}


def _check_options(request: ExportRequest) -> None:
    for name, belongs in OF_FORMAT.items():
        if getattr(request, name) is not None and request.format != belongs:
            raise ConfigError(
                f"--{name.replace('_', '-')} is of --format {belongs}, not of {request.format}: remove it"
            )
    if request.plain_prompts and request.format == "hf":
        raise ConfigError(
            "--plain-prompts is of sft and dpo: --format hf holds prompts as text and as messages; remove it"
        )
    if request.best is not None and request.best < 1:
        raise ConfigError(f"--best {request.best}: choose at least one answer of each prompt")
    if request.margin is not None and request.margin < 0:
        raise ConfigError(f"--margin {request.margin}: the least difference of two rewards is not negative")
    named = request.output.rstrip("/").rpartition("/")[2]
    if request.format != "hf" and not named.endswith(SUFFIXES):
        raise ConfigError(f"--output {request.output!r}: end its name with {' or '.join(SUFFIXES)}")
    if request.format == "hf" and named.endswith(SUFFIXES):
        raise ConfigError(f"--output {request.output!r}: --format hf makes a folder; name one")


def _choice(request: ExportRequest, iterations: list[int]) -> Choice:
    said = {name: getattr(request, name) for name in OF_FORMAT}
    given = {name: value for name, value in said.items() if value is not None}
    return Choice(request.format, tuple(iterations), request.where, plain_prompts=request.plain_prompts, **given)


def _iterations(store: RunStore, rescoring: Rescoring | None, asked: str | None) -> list[int]:
    """Those with rewards that are asked for; of a rescoring, those that it has."""

    def is_there(iteration: int) -> bool:
        if store.stage(iteration, Stage.ROLLOUT) is None:
            return False
        return rescoring is None or rescoring.manifest(iteration) is not None

    there = [iteration for iteration in store.iterations() if is_there(iteration)]
    return within(asked, there, store.url if rescoring is None else rescoring.url)


def _suffix(request: ExportRequest) -> str:
    return next((suffix for suffix in SUFFIXES if request.output.endswith(suffix)), "")


def _speech(config: Config, store: RunStore, body: dict[str, Any]) -> Speech:
    """The tokenizer of the run's policy."""
    beside = config.storage.model_copy(update={"root": store.root, "options": store.options})
    pinned = pin_models({"policy": models_of(config)["policy"]}, beside, body.get("models"))
    return Speech(
        load_tokenizer(
            resolve_model(pinned["policy"]),
            trust_remote_code=config.run.trust_remote_code,
            use_fast=not config.data.disable_fast_tokenizer,
        )
    )


def _manifests(store: RunStore, rescoring: Rescoring | None, choice: Choice) -> list[dict[str, Any]]:
    """Path below the run, and sha256, of every manifest that was read."""
    found: list[dict[str, Any]] = []
    for iteration in choice.iterations:
        for stage in (Stage.ROLLOUT, Stage.REWARD):
            if (complete := store.stage(iteration, stage)) is not None:
                found.append({"path": complete[1].path, "sha256": complete[1].sha256})
        if rescoring is not None:
            path, sha256 = rescoring.manifest_ref(iteration)
            found.append({"path": path, "sha256": sha256})
    return found
