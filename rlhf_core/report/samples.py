"""The best and the worst answers of some iterations, as people read them.

::

    iterations with rewards ─▶ at most MOST_ITERATIONS of them ─▶ keys and rewards ─▶ best, worst ─▶ their texts, images

Rewards are looked at first, texts only of those that are shown; shards are read one at a time. So a report of thousands of long
answers needs the memory of one shard.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import RlhfError
from rlhf_core.storage import query_trajectories, trajectories

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.report.run_log import RunLog
    from rlhf_core.storage import RunStore

MOST_ITERATIONS = 24
BEST = WORST = 3
ANSWER, PROMPT, LABEL = 4000, 2000, 400  # characters that are shown
THUMBNAIL = 128  # pixels of the longer side
MOST_IMAGES = 4  # of a sample
MOST_THUMBNAILS = 160  # of a report: about half a megabyte
MOST_TURNS = 24
FAILED_ITERATIONS = 12  # whose failed samples are asked for their reasons

_TEXTS = [
    "group_id", "sample_index", "segment_index", "prompt", "answer", "transcript", "messages", "label", "reward", "score",
    "stop_reason", "action_tokens", "version_min", "version_max", "step_rewards", "reward_metrics", "images", "datasource",
]  # fmt: skip

# The last segment of an episode speaks for it: all share its reward.
_RANKED = """
select group_id, sample_index, max(segment_index) as segment_index, max(reward) as reward, count(*) as segments
from trajectories where reward is not null and error is null
group by all order by reward desc, group_id, sample_index
"""
_REASONS = """
select error, count(*) as times from trajectories where error is not null group by all order by times desc, error limit 20
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer and what was made of it."""

    reward: float | None
    answer: str
    prompt: str
    turns: tuple[Turn, ...]  # of a conversation, without the last answer; empty where the prompt was plain text
    facts: tuple[tuple[str, str], ...]
    images: tuple[str, ...] = ()  # data URLs
    more_images: int = 0
    rank: str = ""  # best or worst


@dataclass(frozen=True, slots=True)
class IterationSamples:
    """What is shown of one iteration."""

    iteration: int
    samples: tuple[Sample, ...]
    count: int  # of all that have a reward
    problem: str = ""  # why there are none


class Thumbnails:
    """Images of a run, small; at most ``MOST_THUMBNAILS``, each made once."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._made: dict[str, str | None] = {}

    def of(self, uris: Sequence[str]) -> tuple[str, ...]:
        """Data URLs of the first images that can be read."""
        return tuple(url for uri in uris[:MOST_IMAGES] if (url := self._url(uri)) is not None)

    def _url(self, uri: str) -> str | None:
        if uri not in self._made:
            if len(self._made) >= MOST_THUMBNAILS:
                return None
            self._made[uri] = self._make(uri)
        return self._made[uri]

    def _make(self, uri: str) -> str | None:
        from PIL import Image

        try:
            png = self._store.get_image(uri)
        except RlhfError:
            return None
        with Image.open(io.BytesIO(png)) as image:
            small = image.convert("RGB")
            small.thumbnail((THUMBNAIL, THUMBNAIL))
            out = io.BytesIO()
            small.save(out, "JPEG", quality=80)
        return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def samples_of(log: RunLog) -> list[IterationSamples]:
    """Of iterations that have rewards: the first, the last, and some between."""
    thumbnails = Thumbnails(log.store)
    found = []
    for iteration in spread(sorted(log.scored), MOST_ITERATIONS):
        try:
            found.append(_of_iteration(log.store, iteration, thumbnails))
        except RlhfError as error:
            found.append(IterationSamples(iteration, (), 0, f"{type(error).__name__}: {error}"))
    return found


def held_out_samples(log: RunLog) -> list[Sample]:
    """Answers that the newest evaluation recorded for people."""
    rows = (log.evaluation or {}).get("samples") or []
    return [
        _sample({**row, "stop_reason": row.get("stop"), "action_tokens": row.get("tokens")}, (), 0, 1) for row in rows
    ]


def add_reasons(log: RunLog) -> None:
    """Why samples failed in the rollout: from their rows, of some of the iterations that have such."""
    for iteration in spread(log.failed_rollouts, FAILED_ITERATIONS):
        try:
            rows = query_trajectories(log.store, _REASONS, iteration).to_pylist()
        except RlhfError as error:
            log.problems.append(str(error))
            continue
        for row in rows:
            log.count_failure("reasons of failed samples", cut(row["error"], 600), row["times"])


def spread(items: Sequence[int], most: int) -> list[int]:
    """The first, the last, and evenly many between."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def cut(text: str, most: int) -> str:
    """A text that is not too long; of a longer one the beginning and the end."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]}\n… {len(text) - most:,} characters left out …\n{text[head - most :]}"


def _of_iteration(store: RunStore, iteration: int, thumbnails: Thumbnails) -> IterationSamples:
    ranked = query_trajectories(store, _RANKED, iteration).to_pylist()
    chosen = ranked if len(ranked) <= BEST + WORST else [*ranked[:BEST], *ranked[-WORST:]]
    if not chosen:
        return IterationSamples(iteration, (), 0, "no answer of this iteration has a reward")
    texts = {_key(row): row for row in _rows(store, iteration, chosen)}
    samples = []
    for place, row in enumerate(chosen):
        uris = [image["uri"] for image in texts[_key(row)]["images"] or ()]
        rank = "best" if place < BEST else "worst"
        samples.append(_sample(texts[_key(row)], thumbnails.of(uris), len(uris), row["segments"], rank))
    return IterationSamples(iteration, tuple(samples), len(ranked))


def _rows(store: RunStore, iteration: int, chosen: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ", ".join(
        f"({_quoted(row['group_id'])}, {int(row['sample_index'])}, {int(row['segment_index'])})" for row in chosen
    )
    where = f"(group_id, sample_index, segment_index) in ({keys})"
    table = trajectories(store, iteration, where, columns=_TEXTS)
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="lossy")
    return rows


def _sample(row: Mapping[str, Any], images: tuple[str, ...], num_images: int, segments: int, rank: str = "") -> Sample:
    turns = _turns(row.get("messages"))
    answer = str(row.get("answer") or "")
    if not turns and row.get("transcript"):
        answer = str(row["transcript"])  # all turns of an agent that keeps no messages
    return Sample(
        reward=row.get("reward"),
        answer=cut(answer, ANSWER),
        prompt=cut(str(row.get("prompt") or ""), PROMPT),
        turns=turns,
        facts=tuple(_facts(row, segments)),
        images=images,
        more_images=num_images - len(images),
        rank=rank,
    )


def _facts(row: Mapping[str, Any], segments: int) -> Iterable[tuple[str, str]]:
    if row.get("label") is not None:
        yield "label", cut(str(row["label"]), LABEL)
    if row.get("score") is not None and row["score"] != row.get("reward"):
        yield "score", f"{row['score']:.4g}"
    if row.get("stop_reason"):
        yield "stop", str(row["stop_reason"])
    if row.get("action_tokens") is not None:
        yield "tokens", str(row["action_tokens"])
    if row.get("version_min") is not None:
        low, high = row["version_min"], row["version_max"]
        yield "policy version", str(low) if low == high else f"{low} to {high}"
    if segments > 1:
        yield "segments", f"{segments}, this is the last"
    if row.get("step_rewards"):
        yield "step rewards", ", ".join(f"{step['reward']:.4g}" for step in row["step_rewards"])
    for name, value in sorted((row.get("reward_metrics") or {}).items()):
        yield name, f"{value:.4g}"
    if row.get("datasource"):
        yield "source", str(row["datasource"])


def _turns(messages: str | None) -> tuple[Turn, ...]:
    """Of chat messages; of very many the first ones and the last."""
    if not messages:
        return ()
    listed = json.loads(messages)
    if not isinstance(listed, list) or not all(isinstance(message, dict) for message in listed):
        return ()
    found = [Turn(str(message.get("role", "?")), cut(_text(message), PROMPT)) for message in listed]
    if len(found) <= MOST_TURNS:
        return tuple(found)
    half = MOST_TURNS // 2
    left_out = Turn("…", f"{len(found) - 2 * half} messages left out")
    return (*found[:half], left_out, *found[-half:])


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # of text and images
        content = "".join(
            str(part.get("text", f"[{part.get('type', '?')}]")) if isinstance(part, dict) else str(part)
            for part in content
        )
    calls = message.get("tool_calls") or ()
    told = [
        f"→ {json.dumps(call.get('function', call), ensure_ascii=False)}" for call in calls if isinstance(call, dict)
    ]
    return "\n".join([*([str(content)] if content else []), *told])


def _key(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["group_id"], row["sample_index"], row["segment_index"]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
