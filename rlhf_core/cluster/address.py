"""Where this process can be reached by those of other nodes: at the address by which Ray knows its node.

On the local stack that is a loopback address, and so these listen nowhere else.
"""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil
import ray


def meeting_point() -> tuple[str, int]:
    """This node's address, and a port of it that nobody listens on now."""
    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return address, int(probe.getsockname()[1])


def node_id() -> str:
    """Ray's name of the node this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def use_node_address() -> None:
    """Have the libraries of this process meet their peers at the node's address. Call before they are imported.

    Left alone, gloo listens where the machine's host name points, which is loopback on many, and vLLM where the route to the
    internet begins. What the environment says already stays. NCCL finds the networks by itself; on a cluster of one machine it
    would find more than it needs, and listen there.
    """
    address = ray.util.get_node_ip_address()
    os.environ.setdefault("VLLM_HOST_IP", address)
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if ip_address(address).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this address; None if none of this machine has."""
    for name, held in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in held):
            return name
    return None
