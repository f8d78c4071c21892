"""Where the ranks of a job meet: a store that listens on one address, the group's.

::

    rank 0   a socket bound to MASTER_ADDR:MASTER_PORT ─▶ TCPStore ─┐
    rank 1   ───────────────────────────── TCPStore, a client of it ┴▶ torch.distributed, DeepSpeed

The store that torch would make listens on every interface of the machine, and asks nobody who they are.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore, register_rendezvous_handler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

SCHEME = "rlhf"
INIT_METHOD = f"{SCHEME}://"  # for torch.distributed.init_process_group; where to meet stands in the environment
BACKLOG = 4096  # ranks that wait to be accepted


def make_store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of a job, served by rank 0.

    Args:
        address: on which rank 0 listens: one of its machine's.
        port: a free one there; 0, of a single rank: any.
        rank: of this process.
        world_size: ranks of the job.
        timeout: of every wait for another rank.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    arguments: dict[str, Any] = {"world_size": world_size, "timeout": timeout, "multi_tenant": True, "use_libuv": True}
    if rank:
        return TCPStore(address, port, is_master=False, **arguments)
    listening = _listen(address, port)
    bound = listening.getsockname()[1]
    return TCPStore(address, bound, is_master=True, master_listen_fd=listening.detach(), **arguments)


def _listen(address: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _rendezvous(
    url: str,
    timeout: timedelta,
    **_: Any,
) -> Iterator[tuple[TCPStore, int, int]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    yield (
        make_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world_size, timeout),
        rank,
        world_size,
    )
    raise RuntimeError("a group of ranks meets once")


register_rendezvous_handler(SCHEME, _rendezvous)
