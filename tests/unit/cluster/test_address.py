"""Which network a node's address belongs to."""

import os
import subprocess
import sys

import pytest

from rlhf_core.cluster.address import interface_of


def test_the_interface_that_has_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_of_no_interface() -> None:
    assert interface_of("192.0.2.200") is None


@pytest.mark.parametrize(
    ("address", "loopback_alone"),
    [(None, True), ("127.0.0.1:6379", True), ("ray://localhost:10001", True), ("10.0.0.5:6379", False)],
)
def test_a_cluster_of_this_machine_listens_on_loopback_alone(address, loopback_alone):
    """Ray reads the variable as it is imported: in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {} if address is None else {"RAY_ADDRESS": address}
    asked = "import rlhf_core.cluster.address; from ray.util import get_node_ip_address; print(get_node_ip_address())"

    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)

    assert (done.stdout.strip() == "127.0.0.1") is loopback_alone
