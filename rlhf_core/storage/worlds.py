"""How many processes a run has had, and since which version: a run with universal checkpoints may be resumed with others.

::

    run.json                 the first world
    worlds/00000001.json     the next one, from the version where it began
    worlds/00000002.json     …

Sums of floats depend on how many ranks share them, and on their ZeRO stage and threads. So a version has the same weights, bit
for bit, only where it is made in the same world.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.storage.documents import decode_document, encode_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.storage.run_store import RunStore

_FOLDER = "worlds"
_NAME = re.compile(r"(\d{8,})\.json")


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, from one version on."""

    since: int  # the updates of iteration ``since`` and later are made in it
    settings: dict[str, Any]  # dotted keys of the configuration
    cpu_threads: int | None  # of each training rank; None: recorded by no early version of this program

    def same_as(self, other: World) -> bool:
        """True if an update comes out the same in both. It does not ask engines, nor the reference model."""
        return self._learning == other._learning

    @property
    def _learning(self) -> tuple[Any, ...]:
        asked = ("vllm.", "ref.")
        return self.cpu_threads, {key: value for key, value in self.settings.items() if not key.startswith(asked)}


def read_worlds(store: RunStore) -> list[World]:
    """All worlds of the run, in order; none at all if there was only ever one.

    Raises:
        CorruptShardError: a record of one is damaged.
    """
    names = (_NAME.fullmatch(name) for name in store.objects.children(_FOLDER))
    paths = [_path(number) for number in sorted(int(found[1]) for found in names if found)]
    later = [World(**decode_document(store.objects.read(path), store.url_of(path))) for path in paths]
    run = store.read_run() if later else None
    if run is None:
        return later
    return [World(0, {key: _value_at(run["config"], key) for key in later[0].settings}, run.get("cpu_threads")), *later]


def record_world(store: RunStore, world: World) -> None:
    """Write down that the run goes on in another world."""
    number = max(len(read_worlds(store)), 1)
    store.objects.put_once(_path(number), encode_document(asdict(world), store.url_of(_path(number))))


def is_comparable(worlds: Sequence[World], iteration: int) -> bool:
    """True if the update of an iteration was made in the newest world: made again, it gives the same numbers."""
    made_in = [world for world in worlds if world.since <= iteration]
    return not worlds or made_in[-1].same_as(worlds[-1])


def worlds_in_words(worlds: Sequence[World]) -> str:
    """One line for people: what differs between the worlds of a run; empty where there was only ever one."""
    keys = sorted(worlds[0].settings) if worlds else []
    telling = [key for key in keys if len({world.settings.get(key) for world in worlds}) > 1]
    return "; ".join(
        f"from version {world.since}: {', '.join(f'{key}={world.settings.get(key)}' for key in telling)}"
        for world in worlds
    )


def _path(number: int) -> str:
    return f"{_FOLDER}/{number:08d}.json"


def _value_at(tree: dict[str, Any], key: str) -> Any:
    """None where the key did not exist yet."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
