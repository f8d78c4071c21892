"""A filter on system calls, for this process and for good: no network, no other process, no signals to others.

Every Linux since 3.5 has it, it needs no privilege, and containers allow it. A call that is refused fails with EPERM, so
Python raises PermissionError. Calls that are newer than the table below do not exist (ENOSYS), as on an older kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEWEST = {"x86_64": 334, "aarch64": 294}  # the highest number that was looked at
NEWER_ALLOWED = (436, 437, 439, 441)  # close_range, openat2, faccessat2, epoll_pwait2: libc and Python use them

# Number of each refused call on x86_64 and on aarch64; None: there is none.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # the network; socketpair stays, for event loops
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # other processes and threads: making them, and reaching those that exist
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # taking back what was given up here
    "prctl": (157, 167),
    "capset": (126, 91),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "personality": (135, 92),
    # what Landlock does not look at: names and owners of files outside, memory that no limit counts
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "truncate": (76, 45),
    "mkdir": (83, None),  # one flat folder: its size is cheap to watch, and deleting it cannot be made hard
    "mkdirat": (258, 34),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "link": (86, None),
    "linkat": (265, 37),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "memfd_create": (319, 279),
    "fallocate": (285, 47),  # fills the disk before anyone has looked at the folder
    "inotify_add_watch": (254, 27),
    # what processes of this user share: ids are small numbers, so nothing has to be opened first
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # the machine itself
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "fanotify_init": (300, 262),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}

# Refused with these values of their second argument only. A file descriptor can be told to send a signal to any process.
REFUSED_VALUES: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "fcntl": ((72, 25), (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    "ioctl": ((16, 29), (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
}
# Allowed with these values of their second argument only: a pair of datagram sockets could send to other addresses.
ALLOWED_VALUES: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "socketpair": ((53, 199), (0x1, 0x80001)),  # SOCK_STREAM, with and without SOCK_CLOEXEC
}

_LOAD, _EQUAL, _GREATER, _RETURN = 0x20, 0x15, 0x25, 0x06  # of classic BPF: ld [k], jeq, jgt, ret
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER, _ARCH, _SECOND = 0, 4, 24  # offsets in struct seccomp_data


def forbid_new_privileges() -> None:
    """No program started from here gains rights; without privileges, the kernel asks for it before a filter or Landlock.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def install() -> None:
    """Filter this thread's calls, and those of whatever it starts, until it ends; after ``forbid_new_privileges``.

    Raises:
        OSError: the kernel refuses, or the machine is neither x86_64 nor aarch64.
    """
    code = program(os.uname().machine)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header))


def program(machine: str) -> bytes:
    """The filter for a kind of machine, as BPF instructions of 8 bytes.

    Raises:
        OSError: neither x86_64 nor aarch64.
    """
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine!r}")
    column = list(AUDIT_ARCH).index(machine)
    lines = [_op(_LOAD, _ARCH), _op(_EQUAL, AUDIT_ARCH[machine], 1), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            lines += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _EPERM)]
    for number in NEWER_ALLOWED:
        lines += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
    lines += [_op(_GREATER, NEWEST[machine], 0, 1), _op(_RETURN, _ENOSYS)]  # x32's numbers are among them
    for both, values in REFUSED_VALUES.values():
        lines += _by_value(both[column], values, _EPERM, _ALLOW)
    for both, values in ALLOWED_VALUES.values():
        lines += _by_value(both[column], values, _ALLOW, _EPERM)
    return b"".join([*lines, _op(_RETURN, _ALLOW)])


def _by_value(number: int, values: tuple[int, ...], listed: int, others: int) -> list[bytes]:
    body = [_op(_LOAD, _SECOND)]
    for value in values:
        body += [_op(_EQUAL, value, 0, 1), _op(_RETURN, listed)]
    body.append(_op(_RETURN, others))
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def _prctl(option: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [*arguments, 0, 0, 0, 0][:4]
    if libc.prctl(option, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in padded)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {errno.errorcode.get(number, number)}")
