"""Which environments a dataset is made of: ``env:textarena/GuessTheNumber-v0?size=256&seed=1&instruction=Be brief.``

=================  ==========================================================================================
``size``           rows: episodes with seeds of their own
``seed``           another seed, other episodes
``invalid_reward`` added to the reward where an action cannot be read, or is against the rules; default 0
``instruction``    text behind the first observation
``name``           the datasource in metrics; default: ``textarena/GuessTheNumber-v0``
anything else      goes to the environment
=================  ==========================================================================================

Values are read as YAML; ``&``, ``=`` and ``+`` inside one are written ``%26``, ``%3D`` and ``%2B``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import yaml

from rlhf_core.environments.base import Settings
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "env:"
DEFAULT_SIZE = 256
FORM = re.compile(r"env:(?P<collection>[\w-]+)/(?P<name>[\w.-]+)(\?(?P<query>.*))?", re.DOTALL)
EXAMPLE = "env:textarena/GuessTheNumber-v0?size=256&seed=1"


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Many episodes in one kind of environment."""

    collection: str
    name: str  # within the collection
    settings: Settings
    size: int = DEFAULT_SIZE
    seed: int = 0
    datasource: str = ""

    @property
    def environment(self) -> str:
        """Collection and name."""
        return f"{self.collection}/{self.name}"

    def episodes(self) -> Iterator[EpisodeSpec]:
        """``size`` of them."""
        for index in range(self.size):
            yield EpisodeSpec(self.collection, self.name, self.settings, self._seed_of(index))

    def _seed_of(self, index: int) -> int:
        """In [0, 2³¹). A hash: seeds 0 and 1 of two datasets must not share all their episodes but one."""
        digest = hashlib.sha256(f"environment/{self.seed}/{index}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 2**31


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode: what is needed to make its environment again, in another process."""

    collection: str
    name: str
    settings: Settings
    seed: int

    @property
    def environment(self) -> str:
        """Collection and name."""
        return f"{self.collection}/{self.name}"

    def to_label(self, observation: str) -> dict[str, Any]:
        """The label of a row: JSON. ``observation`` is its prompt, which the environment must show again."""
        return {
            "environment": self.environment,
            **asdict(self.settings),
            "seed": self.seed,
            "observation_sha256": digest_of(observation),
        }

    @classmethod
    def from_label(cls, label: Any) -> EpisodeSpec:
        """The inverse of ``to_label``.

        Raises:
            DataError: it is no such label.
        """
        try:
            collection, _, name = label["environment"].partition("/")
            settings = Settings(float(label["invalid_reward"]), label["instruction"], dict(label["options"]))
            return cls(collection, name, settings, int(label["seed"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"the label {str(label)[:80]!r} describes no environment ({error!r}): take prompts from {EXAMPLE}"
            ) from error


def is_environment(spec: str) -> bool:
    """True for a dataset of environments."""
    return spec.startswith(PREFIX)


def parse_environment(spec: str) -> EnvironmentSpec:
    """What a dataset's entry says.

    Raises:
        DataError: it says nothing that can be understood.
    """
    found = FORM.fullmatch(spec)
    if found is None:
        raise DataError(f"{spec!r} names no environment: write {EXAMPLE}")
    values = _values(spec, found["query"] or "")
    size, seed = (
        _whole(spec, name, values.pop(name, default)) for name, default in (("size", DEFAULT_SIZE), ("seed", 0))
    )
    if size < 1 or seed < 0:
        raise DataError(f"{spec}: size={size}, seed={seed}: a size is at least 1, a seed at least 0")
    invalid_reward = values.pop("invalid_reward", 0.0)
    if isinstance(invalid_reward, bool) or not isinstance(invalid_reward, int | float):
        raise DataError(f"{spec}: invalid_reward={invalid_reward!r}: a number is wanted, such as -0.1")
    instruction, name = str(values.pop("instruction", "")), str(values.pop("name", ""))
    settings = Settings(float(invalid_reward), instruction, values)
    own = f"{found['collection']}/{found['name']}"
    return EnvironmentSpec(found["collection"], found["name"], settings, size, seed, name or own)


def digest_of(observation: str) -> str:
    """Names an observation."""
    return hashlib.sha256(observation.encode()).hexdigest()[:16]


def _values(spec: str, query: str) -> dict[str, Any]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        values = {key: yaml.safe_load(value) for key, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{spec}: {error}; write the options as key=value&key=value") from error
    if len(values) < len(pairs):
        raise DataError(f"{spec}: an option is given twice")
    return values


def _whole(spec: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"{spec}: {name}={value!r}: a whole number is wanted")
    return value
