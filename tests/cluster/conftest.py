"""Machines on a network of this one's own, with an S3 server that all of them reach."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from machines import Network, skip_without_namespaces
from s3_server import S3Server

sys.path.insert(0, str(Path(__file__).parent.parent / "stack"))  # local_stack

FOREIGN = ("PREFECT_", "MLFLOW_", "RAY_", "RLHF_", "AWS_", "SLURM")  # of another stack, if the tests run beside one


@dataclass
class Site:
    """The network, and what every process on it must know."""

    network: Network
    s3: S3Server

    @property
    def root(self) -> str:
        """Where runs are logged."""
        return f"s3://{self.s3.bucket}/runs"

    @property
    def environment(self) -> dict[str, str]:
        return {**self.s3.environment, "OMP_WAIT_POLICY": "PASSIVE", "DO_NOT_TRACK": "1", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """A network of this module's own. The test's own process reads the logs of runs on its S3 server."""
    skip_without_namespaces()
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, Network(folder / "machines") as network:
        for name in [name for name in os.environ if name.startswith(FOREIGN)]:
            patch.delenv(name)
        switch = network.switch
        within = ("nsenter", f"--target={switch.pid}", "--net")
        with S3Server(folder / "s3", host=switch.address, within=within) as s3:
            for name, value in s3.environment.items():
                patch.setenv(name, value)
            yield Site(network, s3)
