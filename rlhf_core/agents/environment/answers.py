"""From whatever an environment answered to plain values, and from those to typed results.

In the environment's process (``plain_reset``, ``plain_step``): numbers lose their wrapping (numpy, torch), images become PNG
files, a mistake is an ``AgentError`` that names the key. In the executor's (``Reset``, ``Step``): the typed results.

======================  ======================================================================================
``rewards``, ``scores``  a finite number: int, float, bool, numpy or torch scalar. None or left out: none
``done``                 the same; left out: False
``environment_feedback`` text, a chat message, or a list of them; may be left out by the last step only
``environment_images``   PIL images, arrays [height, width, 3] of uint8, file names, or the bytes of image files
``sampling_params``      what ``step`` was given, or None; only ``max_tokens`` may be another
``extra_logs``           numbers by name; whatever else is left out, and counted in ``dropped_logs``
======================  ======================================================================================

Other keys are nobody's business, unless they look like one of these misspelt.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.errors import AgentError
from rlhf_core.processes.values import finite, shown

RESET_KEYS = ("observation", "environment_images")
STEP_KEYS = (
    "rewards",
    "scores",
    "environment_feedback",
    "environment_images",
    "done",
    "sampling_params",
    "extra_logs",
)

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy is shown: text that is taken verbatim, or chat messages; and images, as files."""

    said: str | Messages
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one action."""

    reward: float | None
    score: float | None
    feedback: Observation | None  # None: nothing
    done: bool
    sampling: dict[str, Any] | None  # None: as before
    logs: dict[str, float] = field(default_factory=dict)
    dropped_logs: int = 0


def plain_reset(answer: Any) -> dict[str, Any]:
    """JSON of what ``reset`` answered. ``AgentError`` names the key."""
    if answer is None:
        return {}
    fields = _fields(answer, "reset", RESET_KEYS)
    plain: dict[str, Any] = {}
    if fields.get("observation") is not None:
        plain["observation"] = _said(fields["observation"], "observation of reset")
    plain["images"] = _images(fields.get("environment_images"), "environment_images of reset")
    return plain


def plain_step(answer: Any) -> dict[str, Any]:
    """JSON of what ``step`` answered. ``AgentError`` names the key."""
    fields = _fields(answer, "step", STEP_KEYS)
    logs, dropped = plain_logs(fields.get("extra_logs"))
    feedback = fields.get("environment_feedback")
    done = fields.get("done")
    return {
        "reward": _optional(fields.get("rewards"), "rewards of step"),
        "score": _optional(fields.get("scores"), "scores of step"),
        "done": False if done is None else bool(number(done, "done of step")),
        "feedback": None if feedback is None else _said(feedback, "environment_feedback of step"),
        "images": _images(fields.get("environment_images"), "environment_images of step"),
        "sampling": _sampling(fields.get("sampling_params")),
        "logs": logs,
        "dropped_logs": dropped,
    }


def read_observation(plain: Mapping[str, Any], default: str | Messages) -> Observation:
    """What ``plain_reset`` made."""
    return Observation(plain.get("observation", default), tuple(plain.get("images", ())))


def read_step(plain: Mapping[str, Any]) -> Step:
    """What ``plain_step`` made.

    Raises:
        AgentError: the episode goes on, and there is nothing to go on with.
    """
    said, images = plain["feedback"], tuple(plain["images"])
    if said is None and images:
        raise AgentError("environment_images of step without environment_feedback: say in its text where they are")
    if said is None and not plain["done"]:
        raise AgentError(
            "step answered neither done nor environment_feedback: give one of them ('' goes on without a word)"
        )
    return Step(
        reward=plain["reward"],
        score=plain["score"],
        feedback=None if said is None else Observation(said, images),
        done=plain["done"],
        sampling=plain["sampling"],
        logs=dict(plain["logs"]),
        dropped_logs=plain["dropped_logs"],
    )


def number(value: Any, what: str) -> float:
    """A finite number out of a plain, numpy or torch scalar. ``AgentError`` names ``what``."""
    plain = value
    if hasattr(value, "item") and callable(value.item):
        try:
            plain = value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise AgentError(f"{what} is {shown(value)}: one number is wanted ({error})") from None
    if not isinstance(plain, int | float):
        raise AgentError(f"{what} is {shown(value)}: a number is wanted")
    try:
        return finite(plain)
    except ValueError as error:
        raise AgentError(f"{what} is {error}: a finite number is wanted") from None


def _fields(answer: Any, method: str, known: tuple[str, ...]) -> Mapping[Any, Any]:
    if not isinstance(answer, Mapping):
        raise AgentError(f"{method} answered {shown(answer)}: a dict is wanted, with {', '.join(known)}")
    for key in answer:
        if key not in known and (meant := difflib.get_close_matches(str(key), known, 1, cutoff=0.8)):
            raise AgentError(f"{method} answered the key {key!r}: {meant[0]!r} is meant?")
    return answer


def _optional(value: Any, what: str) -> float | None:
    return None if value is None else number(value, what)


def _said(value: Any, what: str) -> str | Messages:
    if isinstance(value, str):
        return value
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list | tuple) or not messages:
        raise AgentError(f"{what} is {shown(value)}: text, a chat message or a list of them is wanted")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise AgentError(f"{what} holds {shown(message)}: a chat message has a role and a content")
    return [dict(message) for message in messages]


def _sampling(value: Any) -> dict[str, Any] | None:
    if value is None or isinstance(value, Mapping):
        return None if value is None else dict(value)
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    raise AgentError(f"sampling_params of step is {shown(value)}: what step was given is wanted, or None")


def plain_logs(value: Any, read: Callable[[Any, str], float | None] = number) -> tuple[dict[str, float], int]:
    """The numbers of ``extra_logs``, as ``read`` understands them, and how many entries were left out."""
    if value is None:
        return {}, 0
    if not isinstance(value, Mapping):
        return {}, 1
    logs: dict[str, float] = {}
    dropped = 0
    for name, entry in value.items():
        try:
            found = None if entry is None else read(entry, f"extra_logs[{name!r}]")
        except AgentError:
            dropped += 1
            continue
        if found is not None:
            logs[str(name)] = found
    return logs, dropped


def _images(value: Any, what: str) -> list[bytes]:
    if value is None:
        return []
    several = value if isinstance(value, list | tuple) else [value]
    return [_image(entry, f"{what}[{index}]") for index, entry in enumerate(several)]


def _image(value: Any, what: str) -> bytes:
    """The bytes of an image file. Whether they can be read is looked at where they are taken in."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        try:
            return Path(value).read_bytes()
        except OSError as error:
            raise AgentError(f"{what} cannot be read: {error}") from error
    from PIL import Image  # environments without images need not pay for it

    if hasattr(value, "__array_interface__") and not isinstance(value, Image.Image):
        try:
            value = Image.fromarray(value)
        except (TypeError, ValueError) as error:
            raise AgentError(f"{what} is no array [height, width, 3] of uint8: {error}") from error
    if not isinstance(value, Image.Image):
        raise AgentError(f"{what} is {shown(value)}: a PIL image, an array, a file name or bytes are wanted")
    written = io.BytesIO()
    value.save(written, format="PNG")
    return written.getvalue()
