"""An account as text: the tree of runs, then how each was made, nearest first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rlhf_core.lineage.ancestry import DIGITS, TRAINING, draw
from rlhf_core.lineage.user_code import changed_code
from rlhf_core.storage import worlds_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rlhf_core.lineage.account import Account
    from rlhf_core.lineage.run_record import IterationRecord, RunRecord, SavedVersion, StageRecord

SHOWN = 4  # iterations at the beginning, and at the end, of a long run
INDENT = "  "


def account_lines(account: Account) -> Iterator[str]:
    """Lines of text, summarised; all of it is in ``Account.to_json``."""
    yield from draw(account.origin)
    for record in account.records.values():
        yield ""
        yield from run_lines(record)


def run_lines(record: RunRecord) -> Iterator[str]:
    """How one run made the version that was used."""
    yield f"{record.run_id}, version {record.version}: {record.url}"
    yield f"{INDENT}started     {record.created_at}, {TRAINING.get(record.kind, record.kind)}, seed {record.seed}"
    yield f"{INDENT}code        {_code(record)}"
    if record.packages:
        yield f"{INDENT}packages    {', '.join(f'{name} {version}' for name, version in record.packages.items())}"
    yield f"{INDENT}user code   {_files(record.user_code)}"
    for change in record.code_changes:
        lines = changed_code(_before(record, change), change["user_code"])
        yield f"{INDENT * 2}from {change['stage']} of iteration {change['iteration']} on: {'; '.join(lines)}"
        yield f"{INDENT * 3}{_files(change['user_code'])}"
    yield f"{INDENT}config      sha256 {_short(record.config['sha256'])}; not at its default:"
    yield from (f"{INDENT * 3}{key}={_value(value)}" for key, value in record.config["changed"].items())
    data = {name: value for name, value in record.data.items() if name != "fingerprint"}
    counts = ", ".join(f"{name} {value}" for name, value in data.items())
    yield f"{INDENT}data        fingerprint {_short(record.data.get('fingerprint', ''))}; {counts}"
    if len(record.worlds) > 1:
        yield f"{INDENT}processes   {worlds_in_words(record.worlds)}"
    if record.replay is not None:
        yield f"{INDENT}replay of   {record.replay['source_url']}, iterations {record.replay['iterations']}"
    yield from _iterations(record)
    if record.checkpoint is not None:
        yield from _checkpoint(record.checkpoint)
    elif record.version:
        yield f"{INDENT}checkpoint  none of version {record.version} is kept"
    yield from (f"{INDENT}damaged     {problem}" for problem in record.problems)


def _iterations(record: RunRecord) -> Iterator[str]:
    shown = list(record.iterations)
    left_out = len(shown) - 2 * SHOWN - 1
    for place, iteration in enumerate(shown):
        if left_out > 0 and SHOWN <= place < len(shown) - SHOWN:
            if place == SHOWN:
                yield f"{INDENT}… {left_out + 1} more iterations, all of them with --json"
            continue
        yield from _iteration(iteration)


def _iteration(record: IterationRecord) -> Iterator[str]:
    begin, end = (_cursor(record.prompts.get(name)) for name in ("cursor_in", "cursor_out"))
    drawn = f", prompts {begin} to {end}" if begin and end else ""
    yield f"{INDENT}iteration {record.iteration}{drawn}"
    for stage in (*record.rounds, *record.stages):
        yield f"{INDENT * 3}{stage.name:<10}  {_stage(stage)}"
    made = ", ".join(f"{_named(name)} {_short(value)}" for name, value in record.weights.items())
    if made:
        yield f"{INDENT * 3}version {record.iteration + 1}   {made}"


def _stage(stage: StageRecord) -> str:
    shards = f", {len(stage.parts)} shard{'' if len(stage.parts) == 1 else 's'}" if stage.parts else ""
    rows = f", {stage.rows} rows, {stage.tokens} tokens" if stage.rows else ""
    taken = f", taken from {stage.source['url']}" if stage.source and "url" in stage.source else ""
    return f"sha256 {_short(stage.sha256)}{shards}{rows}{taken}"


def _checkpoint(saved: SavedVersion) -> Iterator[str]:
    size = sum(file.bytes for file in saved.files)
    yield f"{INDENT}checkpoint  {saved.url}: {len(saved.files)} files, {size} bytes"
    for name, value in saved.weights.items():
        yield f"{INDENT * 3}{_named(name)} {_short(value)}"


def _code(record: RunRecord) -> str:
    revision = record.code.get("revision")
    if revision is None:
        return "no git revision is recorded"
    return f"git {_short(revision)}{', with changes that were not committed' if record.code.get('dirty') else ''}"


def _files(files: Mapping[str, str]) -> str:
    return ", ".join(f"{path} sha256 {_short(sha256)}" for path, sha256 in files.items()) or "none is recorded"


def _before(record: RunRecord, change: Mapping[str, Any]) -> dict[str, str]:
    """The user's files before a change."""
    place = record.code_changes.index(dict(change))
    before: dict[str, str] = record.code_changes[place - 1]["user_code"] if place else record.user_code
    return before


def _cursor(cursor: Mapping[str, int] | None) -> str:
    return "" if cursor is None else f"{cursor['epoch']}:{cursor['offset']}"


def _named(name: str) -> str:
    """``digest`` is that of the policy."""
    return "weights" if name == "digest" else name.replace("_", " ")


def _short(sha256: str) -> str:
    return sha256[:DIGITS]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
