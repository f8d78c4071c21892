"""The rigs of tests/pipeline serve here too. At the end a table says what was checked on which GPU."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "pipeline"))

OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_terminal_summary(terminalreporter) -> None:
    """Where there is no GPU, pytest's own list of what was skipped says so."""
    if not torch.cuda.is_available():
        return
    rows = [
        (outcome, f"{report.duration:.1f} s", report.nodeid.rpartition("/")[2])
        for outcome in OUTCOMES
        for report in terminalreporter.getreports(outcome)
        if "tests/gpu/" in report.nodeid
    ]
    name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / 2**30
    terminalreporter.section(f"{torch.cuda.device_count()} × {name}, {memory:.0f} GiB, CUDA {torch.version.cuda}")
    for outcome, seconds, test in sorted(rows, key=lambda row: row[2]):
        terminalreporter.write_line(f"{outcome:8} {seconds:>8}  {test}")
