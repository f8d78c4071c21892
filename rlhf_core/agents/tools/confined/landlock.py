"""Landlock: which files this process may touch, for good, decided by the process itself. Linux 5.13 and later.

What it does not cover (names, sizes and times of files can be seen; modes and owners changed) is left to ``seccomp``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

TYPE_CHECKING = False  # the module typing takes longer to import than all of this takes to run
if TYPE_CHECKING:
    from collections.abc import Iterable

READ = 1 << 2 | 1 << 3  # files, and lists of folders
READ_FILE = 1 << 2
WRITE_FILE = 1 << 1
IN_FOLDER = READ | WRITE_FILE | 1 << 5 | 1 << 8 | 1 << 14  # remove files, make files, truncate them
FILE_ONLY = 1 | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # rights that a rule on a file may have

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on every machine
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many kinds of access to files each version knows; since 5: 16
_LATEST_RIGHTS = 16


def version() -> int:
    """The version of the interface; 0 if the kernel has none."""
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def restrict(readable: Iterable[str], writable_files: Iterable[str], folder: str) -> None:
    """From now on: read below ``readable``, read and write ``writable_files``, make and remove files in ``folder``; no more.

    Paths that do not exist are left out. Where the kernel can, other processes are out of reach as well.

    Raises:
        OSError: the kernel refuses.
    """
    abi = version()
    if abi == 0:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    handled = (1 << _RIGHTS.get(abi, _LATEST_RIGHTS)) - 1
    network = 0b11 if abi >= 4 else 0  # bind and connect of TCP
    scoped = 0b11 if abi >= 6 else 0  # abstract Unix sockets, signals
    attributes = struct.pack("QQQ", handled, network, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _call(_CREATE, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ & handled)
        for path in writable_files:
            _allow(ruleset, path, (READ_FILE | WRITE_FILE) & handled)
        _allow(ruleset, folder, IN_FOLDER & handled)
        _call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):  # noqa: PTH112  pathlib takes longer to import than all of this takes to run
            rights &= FILE_ONLY
        rule = struct.pack("=Qi", rights, parent)  # struct landlock_path_beneath_attr, packed
        _call(_ADD_RULE, ruleset, 1, ctypes.create_string_buffer(rule, len(rule)), 0)
    finally:
        os.close(parent)


def _call(number: int, *arguments: object) -> int:
    libc = _libc()
    result = libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return int(result)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
