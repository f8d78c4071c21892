"""The table of the kill matrix, at the end of the output."""

import pytest
from fault_matrix import Table

TABLE = Table()


@pytest.fixture(scope="session")
def matrix_table() -> Table:
    return TABLE


def pytest_terminal_summary(terminalreporter) -> None:
    if TABLE.lost:
        terminalreporter.section("seconds lost to SIGKILL, by process and stage")
        for line in TABLE.lines():
            terminalreporter.write_line(line)
