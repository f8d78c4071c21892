"""The log of a retraining: what each turn started from, which prompts were new to it, and what was decided.

::

    {root}/{name}/
      lease/…                          one turn at a time, one process at a time
      turns/00000001/rows-….json       the row ids that were new when it began: fixed, whatever the datasets become
      turns/00000001/turn.json         begun
      turns/00000001/drawn.json        the row ids that its run has sampled: not new to later turns
      turns/00000001/decision.json     decided
      turns/00000001/settled.json      and carried out, in the registry too: over

Every document is written once. A turn without ``settled.json`` is the open one; the next start goes on with it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rlhf_core.storage.digest import sha256_of
from rlhf_core.storage.documents import decode_document, encode_document

if TYPE_CHECKING:
    from collections.abc import Collection

    from rlhf_core.storage.run_store import RunStore

Origin: TypeAlias = Literal["champion", "best", "latest", "incumbent", "config"]

_FOLDER = "turns"
_NUMBER = re.compile(r"\d{8,}")
_TURN, _DRAWN, _DECISION, _SETTLED = "turn.json", "drawn.json", "decision.json", "settled.json"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn, fixed when it begins."""

    number: int  # from 1
    run_id: str  # of its training run
    flow_run_id: str | None  # that began it: its retry is this turn again, never the next one
    start: str  # the model it trains from, and has to beat
    start_from: Origin  # how that was found
    start_version: int | None  # in the registry
    rows: str  # path of the list of its prompts
    row_count: int
    created_at: str  # ISO, UTC


@dataclass(frozen=True)
class RetrainLog:
    """Of the retraining that ``store`` is named after. Only who holds its lease writes."""

    store: RunStore

    def numbers(self) -> list[int]:
        """Every turn that has begun, ascending."""
        folders = [name for name in self.store.objects.children(_FOLDER) if _NUMBER.fullmatch(name)]
        return sorted(int(name) for name in folders if self.store.objects.exists(_path(int(name), _TURN)))

    def turn(self, number: int) -> TurnRecord:
        """A turn that has begun."""
        body = self._read(number, _TURN)
        assert body is not None, "numbers() names turns that have begun"
        return TurnRecord(**body)

    def open_turn(self) -> TurnRecord | None:
        """The newest turn, if it is not over."""
        numbers = self.numbers()
        return None if not numbers or self.is_over(numbers[-1]) else self.turn(numbers[-1])

    def begun_by(self, flow_run_id: str) -> TurnRecord | None:
        """The turn that a flow run began."""
        turns = (self.turn(number) for number in reversed(self.numbers()))
        return next((turn for turn in turns if turn.flow_run_id == flow_run_id), None)

    def write_rows(self, number: int, row_ids: Collection[str]) -> str:
        """Store the prompts of a turn that is about to begin. Returns the path of the list."""
        data = json.dumps(sorted(row_ids), ensure_ascii=False).encode()
        path = _path(number, f"rows-{sha256_of(data)[:16]}.json")
        self.store.objects.put_once(path, data)
        return path

    def begin(self, turn: TurnRecord) -> None:
        """Begin a turn; ``ConflictError`` if it has begun otherwise."""
        self._write(turn.number, _TURN, asdict(turn))

    def write_drawn(self, number: int, row_ids: Collection[str]) -> None:
        """Record which rows the turn's run has sampled."""
        self._write(number, _DRAWN, {"row_ids": sorted(row_ids)})

    def seen(self) -> set[str]:
        """The rows that the turns so far have sampled; those of an abandoned turn are new again."""
        found: set[str] = set()
        for number in self.numbers():
            decision, drawn = self.decision(number), self._read(number, _DRAWN)
            if drawn is not None and (decision or {}).get("verdict") != "abandoned":
                found.update(drawn["row_ids"])
        return found

    def write_decision(self, number: int, body: dict[str, Any]) -> None:
        """Record what was decided, before it is carried out; ``ConflictError`` if it was decided otherwise."""
        self._write(number, _DECISION, body)

    def decision(self, number: int) -> dict[str, Any] | None:
        """What was decided; None while nothing is."""
        return self._read(number, _DECISION)

    def settle(self, number: int) -> None:
        """The decision is carried out, and the turn over."""
        self._write(number, _SETTLED, {})

    def is_over(self, number: int) -> bool:
        """True once the decision is carried out."""
        return self._read(number, _SETTLED) is not None

    def _write(self, number: int, name: str, body: dict[str, Any]) -> None:
        path = _path(number, name)
        self.store.objects.put_once(path, encode_document(body, self.store.url_of(path)))

    def _read(self, number: int, name: str) -> dict[str, Any] | None:
        path = _path(number, name)
        try:
            return decode_document(self.store.objects.read(path), self.store.url_of(path))
        except FileNotFoundError:
            return None


def _path(number: int, name: str) -> str:
    return f"{_FOLDER}/{number:08d}/{name}"
