"""What a part of the local stack leaves behind when only its first process was killed.

MLflow's server and Ray's head are several processes. Those that outlive the first one hold its port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from pathlib import Path


def listening(port: int, home: Path) -> list[psutil.Process]:
    """Processes of the stack of ``home`` that listen on a port."""
    return [process for process in psutil.process_iter() if _is_of(process, home) and _listens(process, port)]


def _is_of(process: psutil.Process, home: Path) -> bool:
    try:
        return process.environ().get("RLHF_HOME") == str(home)
    except psutil.Error:
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        sockets = process.net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)
