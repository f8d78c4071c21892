"""What travels between the controller and the processes of user code."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf_core.processes.values import decode_values, encode_values
from rlhf_core.processes.wire import FrameReader, encode


def through(message):
    return FrameReader(decode_values).feed(encode_values(message))


@pytest.mark.parametrize(
    "message",
    [
        {"text": "שלום \ud800 \0 e\u0301", "none": None, "deep": [[{"a": [1, 2.5, True]}]]},
        {"images": [b"\x89PNG\r\n", b""]},
        {"text": 'says "$bytes": and \\"$bytes\\":'},
        {"$byte": 1, "bytes$": 2},
        [],
    ],
)
def test_json_and_bytes_arrive_as_they_were(message):
    assert through(message) == message


def test_arrays_and_numbers_of_numpy_become_lists_and_numbers():
    message = {"rewards": np.array([0.5, 1.0]), "score": np.float32(2), "done": np.bool_(True), "pair": (1, 2)}

    assert through(message) == {"rewards": [0.5, 1.0], "score": 2.0, "done": True, "pair": [1, 2]}


def test_infinities_and_nan_are_carried_for_others_to_judge():
    assert str(through([float("nan"), float("inf")])) == "[nan, inf]"


@pytest.mark.parametrize(
    ("message", "error", "named"),
    [
        ({"a": {1, 2}}, TypeError, "a value of type set is neither JSON nor bytes"),
        ({"a": {"$bytes": "x"}}, ValueError, "give it another name"),
        ({"a": [b"x", {"$bytes": "x"}]}, ValueError, "give it another name"),
    ],
)
def test_what_cannot_be_carried_is_refused(message, error, named):
    with pytest.raises(error, match=named):
        encode_values(message)


def test_a_message_in_pieces():
    data, reader = encode({"a": "x" * 1000}), FrameReader()

    pieces = [reader.feed(data[start : start + 100]) for start in range(0, len(data), 100)]

    assert pieces[:-1] == [None] * (len(pieces) - 1)
    assert pieces[-1] == {"a": "x" * 1000}


@pytest.mark.parametrize("stray", [b"hello, this is a print", b"\0\0\0\0\0\0\0\4oops"])
def test_a_stray_write_into_the_channel_is_noticed(stray):
    with pytest.raises((ValueError, json.JSONDecodeError)):
        FrameReader().feed(stray)
