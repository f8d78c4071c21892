"""How far a tracker that keeps files of its own has been told, beside them: a resumed run goes on there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True)
class Told:
    """Where the tale ends."""

    path: Path
    iterations: int = 0  # told completely
    evaluated: int = -1  # newest version whose evaluation is told

    @classmethod
    def read(cls, path: Path) -> Told:
        """What the file says; the beginning, where there is none, or one that was cut off."""
        try:
            body = json.loads(path.read_text())
            return cls(path, int(body["iterations"]), int(body["evaluated"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(path)

    def save(self, **changes: int) -> None:
        """Change fields, and write the file: whole or not at all."""
        for name, value in changes.items():
            setattr(self, name, value)
        body = {name: value for name, value in asdict(self).items() if name != "path"}
        waiting = self.path.with_suffix(".new")
        waiting.write_text(json.dumps(body))
        waiting.replace(self.path)
