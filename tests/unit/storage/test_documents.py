import math

import pytest

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.storage.documents import decode_document, encode_document


def test_a_document_comes_back():
    body = {"b": [1, 2.5, None, "é漢"], "a": {"deep": True}}

    assert decode_document(encode_document(body, "url"), "url") == body


def test_equal_contents_have_equal_bytes():
    assert encode_document({"a": 1, "b": 2}, "url") == encode_document({"b": 2, "a": 1}, "url")


def test_every_flipped_bit_is_found():
    data = encode_document({"rows": 12, "name": "x"}, "url")

    for position in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptShardError, match="url is"):
            decode_document(bytes(damaged), "url")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b'{"checksum": "x"}', b"\xff"])
def test_what_is_no_document_is_refused(data):
    with pytest.raises(CorruptShardError, match="url is no document"):
        decode_document(data, "url")


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}])
def test_what_is_no_json_is_refused_and_placed(value):
    with pytest.raises(StorageError, match=r"url cannot be written: metrics\.loss\[1\] = "):
        encode_document({"metrics": {"loss": [0.5, value]}}, "url")


def test_a_newer_schema_is_refused_with_the_remedy(monkeypatch):
    data = encode_document({}, "url")
    monkeypatch.setattr("rlhf_core.storage.documents.SCHEMA_VERSION", 0)

    with pytest.raises(StorageError, match="upgrade it"):
        decode_document(data, "url")
