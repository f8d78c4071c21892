"""Where ranks meet: at one address of the machine, not at all of them."""

from __future__ import annotations

from datetime import timedelta

import psutil
import pytest

from rlhf_core.training.meeting import make_store

SECONDS = timedelta(seconds=20)


def test_the_store_listens_at_its_address_alone():
    store = make_store("127.0.0.1", 0, rank=0, world_size=1, timeout=SECONDS)

    listening = {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert {place.ip for place in listening if place.port == store.port} == {"127.0.0.1"}


def test_ranks_read_what_others_wrote():
    first = make_store("127.0.0.1", 0, rank=0, world_size=1, timeout=SECONDS)
    second = make_store("127.0.0.1", first.port, rank=1, world_size=1, timeout=SECONDS)

    second.set("key", "value")

    assert first.get("key") == b"value"


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(OSError, match="assign"):
        make_store("192.0.2.77", 0, rank=0, world_size=1, timeout=SECONDS)
