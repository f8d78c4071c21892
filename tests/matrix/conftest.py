"""What became of each cell, told at the end: on the terminal, and with $MATRIX_REPORT as files in that folder."""

import os
from pathlib import Path

import matrix_table
import pytest
from matrix_cells import CELLS

NAMES = {cell.name for cell in CELLS}
RESULTS: dict[str, matrix_table.Result] = {}


@pytest.fixture(scope="session")
def results() -> dict[str, matrix_table.Result]:
    """By the name of the cell."""
    return RESULTS


def pytest_runtest_logreport(report) -> None:
    """A cell that broke a law, or did not end."""
    name = report.nodeid.partition("[")[2].rstrip("]")
    if report.failed and name in NAMES:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(report.longrepr if crash is None else crash.message)
        RESULTS[name] = matrix_table.Result(failed=why.partition("\n")[0][:200])


def pytest_terminal_summary(terminalreporter) -> None:
    if RESULTS:
        terminalreporter.section("the matrix")
        terminalreporter.write_line("\n".join(matrix_table.table(RESULTS)))
    if RESULTS and (folder := os.environ.get("MATRIX_REPORT")):
        matrix_table.write(RESULTS, Path(folder))
