"""From the trajectories of a run to a dataset for other training.

::

    sft   the best answers      input (text or messages), output             rlhf sft, with its default column names
    dpo   preference pairs      prompt (text or messages), chosen, rejected  rlhf dpo, rlhf reward-model
    hf    every sample          every column, token ids and log-probs too    datasets.load_dataset

Two passes: rewards and hashes of all samples choose, then only the chosen ones are read whole, an iteration at a time. What is
left out is counted by reason: nothing disappears in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.data.export_choice import BLANK, IMAGES, OTHER_PROMPT, PARTNER, TURNS
from rlhf_core.errors import DataError
from rlhf_core.records import Stage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from rlhf_core.data.export_choice import Key, Selection
    from rlhf_core.data.said import Said, Speech
    from rlhf_core.records import Trajectory

# name -> kind (storage.exports.row_files); {prompt} is text or messages
ORIGIN = {"datasource": "text", "prompt_id": "text", "iteration": "count", "group": "text"}
SFT = {
    "id": "text",
    "input": "{prompt}",
    "output": "text",
    "reward": "number",
    **ORIGIN,
    "sample": "count",
    "policy_version": "count",
    "stop_reason": "text",
}
DPO = {
    "id": "text",
    "prompt": "{prompt}",
    "chosen": "text",
    "rejected": "text",
    "margin": "number",
    "chosen_reward": "number",
    "rejected_reward": "number",
    **ORIGIN,
    "chosen_sample": "count",
    "rejected_sample": "count",
    "policy_version": "count",
    "chosen_stop_reason": "text",
    "rejected_stop_reason": "text",
}

Example = tuple["Trajectory", "Said"]


def write_samples(selection: Selection, folder: Path) -> None:
    """Format ``hf``: make the folder. ``DataError`` if nothing is left to export."""
    from rlhf_core.storage.exports.full_tables import full_tables, write_parquet_files  # pyarrow

    def tables() -> Iterator[Any]:
        for iteration in selection.choice.iterations:
            keys = selection.matching(iteration).keys()
            yield from full_tables(selection.store, iteration, keys, selection.results(iteration))

    selection.tally.rows = write_parquet_files(tables(), folder)
    if not selection.tally.rows:
        raise selection.nothing()


def write_examples(selection: Selection, speech: Speech, has_messages: bool, file: Path) -> None:
    """Formats ``sft`` and ``dpo``: make the file.

    Args:
        selection: what is chosen.
        speech: decodes the answers.
        has_messages: the run rendered its prompts from chat messages.
        file: ends with one of ``storage.exports.row_files.SUFFIXES``.

    Raises:
        DataError: nothing is left to export.
        ConfigError: prompts that such a file has no column for.
        CorruptShardError: a shard is missing or damaged.
    """
    from rlhf_core.storage.exports.row_files import RowFile  # pyarrow

    choice, tally = selection.choice, selection.tally
    tally.messages = has_messages and not choice.plain_prompts
    columns = SFT if choice.format == "sft" else DPO
    prompt = "messages" if tally.messages else "text"
    plan, rewards = selection.plan()
    rows = RowFile(file, {name: kind.format(prompt=prompt) for name, kind in columns.items()})
    try:
        for iteration, wanted in plan.items():
            said = _said(selection, speech, iteration, {key for keys in wanted for key in keys})
            examples = [(keys, [said[key] for key in keys]) for keys in wanted if said.keys() >= set(keys)]
            selection.leave_out(PARTNER, len(said.keys() - {key for keys, _ in examples for key in keys}))
            rows.write(
                [_row(selection, example, [rewards[iteration, key] for key in keys]) for keys, example in examples]
            )
            for _, example in examples:
                _count(selection, example)
    finally:
        rows.close()
    tally.rows = rows.rows
    if not tally.rows:
        raise selection.nothing()


def _said(selection: Selection, speech: Speech, iteration: int, keys: Collection[Key]) -> dict[Key, Example]:
    """What was said in the samples ``keys``; those that are no prompt with one answer of text are left out."""
    store = selection.store
    found = store.stage(iteration, Stage.ROLLOUT)
    assert found is not None, "only complete iterations are asked for"
    rows: dict[Key, list[Trajectory]] = {}
    for part in found[0].parts:
        for row in store.read_trajectories([part]):
            if (row.group_id, row.sample_index) in keys:
                rows.setdefault((row.group_id, row.sample_index), []).append(row)
    said: dict[Key, Example] = {}
    for key, (row, *more) in rows.items():
        reason = TURNS if more or len(row.action_ranges) != 1 else IMAGES if row.images else None
        if reason is None and not speech.answers_prompt(row):
            reason = OTHER_PROMPT
        answer = speech.text_of(row) if reason is None else None
        if answer is not None and answer.text.strip():
            said[key] = row, answer
        else:
            selection.leave_out(reason or BLANK)
    return said


def _row(selection: Selection, example: list[Example], rewards: list[float]) -> dict[str, Any]:
    row, answer = example[0]
    prompt = row.messages if selection.tally.messages else row.prompt
    if not prompt:
        raise DataError(
            f"{selection.store.url}: iteration {row.iteration} group {row.group_id}: no chat messages are recorded of its "
            "prompt: export rendered prompts with --plain-prompts"
        )
    origin = {
        "datasource": row.datasource,
        "prompt_id": row.prompt_id,
        "iteration": row.iteration,
        "group": row.group_id,
        "policy_version": row.oldest_version,
    }
    name = f"{row.run_id}/{row.iteration}/{row.group_id}/{row.sample_index}"
    if selection.choice.format == "sft":
        texts: Mapping[str, Any] = {"id": name, "input": prompt, "output": answer.text, "reward": rewards[0]}
        values = {**texts, **origin, "sample": row.sample_index, "stop_reason": str(row.stop_reason)}
        return {column: values[column] for column in SFT}
    worse, worse_answer = example[1]
    values = {
        "id": f"{name}-{worse.sample_index}",
        "prompt": prompt,
        "chosen": answer.text,
        "rejected": worse_answer.text,
        "margin": rewards[0] - rewards[1],
        "chosen_reward": rewards[0],
        "rejected_reward": rewards[1],
        **origin,
        "chosen_sample": row.sample_index,
        "rejected_sample": worse.sample_index,
        "chosen_stop_reason": str(row.stop_reason),
        "rejected_stop_reason": str(worse.stop_reason),
    }
    return {column: values[column] for column in DPO}


def _count(selection: Selection, example: list[Example]) -> None:
    tally = selection.tally
    tally.answers += len(example)
    tally.truncated += sum(row.stop_reason.truncated for row, _ in example)
    tally.same_tokens += sum(answer.same_tokens for _, answer in example)
