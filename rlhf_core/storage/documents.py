"""The JSON documents of a run: manifests, run.json, checkpoint.json, pointers.

One canonical form (sorted keys, no spaces, UTF-8), so that equal contents have equal bytes and one digest. Each carries
the version of its schema and the sha256 of the rest, so that a damaged document never reads as a different one::

    {"checksum":"9f…","schema_version":1, …the body…}
"""

from __future__ import annotations

import json
from typing import Any

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.storage.digest import sha256_of

SCHEMA_VERSION = 1


def encode_document(body: dict[str, Any], url: str) -> bytes:
    """The canonical bytes of ``body``; ``StorageError`` naming ``url`` if it is no JSON (NaN is not)."""
    versioned = {**body, "schema_version": SCHEMA_VERSION}
    return _canonical({**versioned, "checksum": sha256_of(_canonical(versioned, url))}, url)


def decode_document(data: bytes, url: str) -> dict[str, Any]:
    """The inverse of ``encode_document``.

    Raises:
        CorruptShardError: the bytes are damaged.
        StorageError: a newer version of this software wrote them.
    """
    try:
        body = json.loads(data)
        checksum = body.pop("checksum")
        version = body["schema_version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptShardError(f"{url} is no document of a run: {error!r}") from error
    found = sha256_of(_canonical(body, url))
    if found != checksum:
        raise CorruptShardError(f"{url} is damaged: its checksum says {checksum}, its contents hash to {found}")
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"{url} has schema version {version}; this software reads up to {SCHEMA_VERSION}: upgrade it"
        )
    del body["schema_version"]
    return dict(body)


def _canonical(body: dict[str, Any], url: str) -> bytes:
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as error:
        raise StorageError(f"{url} cannot be written: {_not_json(body) or error}") from error


def _not_json(value: Any, place: str = "") -> str | None:
    """Where in ``value`` something is no JSON, in words."""
    if isinstance(value, dict):
        found = (_not_json(inner, f"{place}.{key}" if place else str(key)) for key, inner in value.items())
        return next(filter(None, found), None)
    if isinstance(value, list | tuple):
        found = (_not_json(inner, f"{place}[{i}]") for i, inner in enumerate(value))
        return next(filter(None, found), None)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return f"{place} = {value!r} is no JSON value; leave it out, or use None"
    return None
