"""seccomp: system calls that a worker never needs fail with EPERM, in all threads and in all children.

The filter names what is forbidden, since a tensor library and a GPU's driver use too many calls to name them all.
Sockets of the unix family can be made, as drivers and Python do, but not connected: so none leads outside. The ranks of
a group make those of the internet family instead, and the unix ones of a socket pair; beside a GPU both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import Final

from peer.confinement import kernel

# Of x86-64 and of 64-bit Arm; None: not there.
_FORBIDDEN: Final[dict[str, tuple[int | None, int | None]]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "process_mrelease": (448, 448),
    "ioprio_set": (251, 30),
    # memory, messages and semaphores that processes of a user have in common by numbers and names
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # names that come and go, in folders that cannot be opened, too
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    # asynchronous calls, which no filter sees
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    # the kernel and the machine
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_OF_PROGRAMS: Final[dict[str, tuple[int | None, int | None]]] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    # to other processes; a compiler's children are ended
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    # modes, owners, times and attributes, which Landlock does not guard; a linker sets modes
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
_OF_ITSELF: Final[dict[str, tuple[int, int]]] = {  # their first argument is a process, where 0 is the caller
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_SET_PRIORITY: Final = (141, 140)
_SET_AFFINITY: Final = (203, 122)
_SIGNALS: Final = {"kill": (62, 129), "tgkill": (234, 131)}  # the C library's abort uses the second
_BY_COMMAND: Final[dict[str, tuple[int, int, tuple[int, ...]]]] = {  # forbidden are these second arguments
    "fcntl": (72, 25, (8, 15, 1026)),  # F_SETOWN and F_SETOWN_EX, which send signals, F_NOTIFY
    "ioctl": (16, 29, (0x8901, 0x8902, 0x5412, 0x541C)),  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX
}
_CONNECT: Final = {"connect": (42, 203)}
_BIND: Final = {"bind": (49, 200)}
_SOCKET: Final = (41, 198)
_SOCKETPAIR: Final = (53, 199)
_CLONE: Final = (56, 220)
_CLONE3: Final = 435
_SECCOMP: Final = (317, 277)
_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # by the name of the machine, in this order
_X32: Final = 0x40000000  # x86-64's second set of numbers begins here

_AF_UNIX: Final = 1
_AF_INET: Final = 2
_AF_INET6: Final = 10
_AF_NETLINK: Final = 16
_NETLINK_ROUTE: Final = 0
_SOCK_STREAM: Final = 1
_TYPE_BITS: Final = 0xF  # of a socket's type; the others are flags
_CONNECTED_TYPES: Final = (_SOCK_STREAM, 5)  # SOCK_STREAM, SOCK_SEQPACKET: they send nothing without a connection
_NEW_NAMESPACES: Final = 0x7E020000  # all CLONE_NEW* flags that clone takes

_SET_MODE_FILTER: Final = 1
_ALL_THREADS: Final = 1
_SPECULATION_ALLOWED: Final = 4  # otherwise kernels before 5.16 slow the process down, against attacks on browsers

# Instructions of classic BPF.
_LOAD: Final = 0x20
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_IF_AT_LEAST: Final = 0x35
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERROR: Final = 0x00050000
_AT_NUMBER: Final = 0
_AT_ARCHITECTURE: Final = 4
_AT_ARGUMENT: Final = (16, 24, 32)  # the low halves of the first three

_Instruction = tuple[int, int, int, int]  # code, skip if true, skip if false, value
_FORBID: Final[_Instruction] = (_RETURN, 0, 0, _ERROR | errno.EPERM)
_PASS_OVER: Final[_Instruction] = (_RETURN, 0, 0, _ERROR)  # it does nothing, and says that it succeeded
_NUMBER: Final[_Instruction] = (_LOAD, 0, 0, _AT_NUMBER)


def has_filter_for(machine: str) -> bool:
    """Whether the numbers of this processor's system calls are known."""
    return machine in _ARCHITECTURES and sys.maxsize > 1 << 32


def restrict_calls(*, programs: bool = False, tcp: bool = False, accelerators: bool = False) -> None:
    """Forbid the calls for this process. `programs` allows it to start programs, and what these do to files and to each
    other; `tcp` to use the sockets of a group of ranks; `accelerators` to give a socket of the unix family a name, as
    the driver of CUDA does, and beside `tcp` to use it. The process must have forbidden new privileges. Raises OSError.
    """
    machine = platform.machine()
    if sys.platform != "linux" or not has_filter_for(machine):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    allowed = {"programs": programs, "tcp": tcp, "accelerators": accelerators}
    code = b"".join(struct.pack("=HBBI", *one) for one in filter_code(machine, os.getpid(), **allowed))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    number = _SECCOMP[_column(machine)]
    flags = _ALL_THREADS | _SPECULATION_ALLOWED
    if kernel.syscall(number, _SET_MODE_FILTER, flags, ctypes.create_string_buffer(program, len(program))):
        raise OSError(errno.EBUSY, "a thread of this process has a filter of its own")


def filter_code(
    machine: str, pid: int, *, programs: bool = False, tcp: bool = False, accelerators: bool = False
) -> list[_Instruction]:
    """Return the filter of the process `pid` as instructions."""
    column = _column(machine)
    code = [(_LOAD, 0, 0, _AT_ARCHITECTURE), (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]), _FORBID, _NUMBER]
    if machine == "x86_64":
        code += [(_IF_AT_LEAST, 0, 1, _X32), _FORBID]
    forbidden = dict(_FORBIDDEN)
    if not programs:
        forbidden |= _OF_PROGRAMS
    if not tcp:
        forbidden |= _CONNECT
    if not (tcp or accelerators):
        forbidden |= _BIND
    for numbers in forbidden.values():
        if (number := numbers[column]) is not None:
            code += _where(number, [_FORBID])
    for numbers in _OF_ITSELF.values():
        code += _where(numbers[column], _unless_first_is(0, _FORBID))
    code += _where(_SET_PRIORITY[column], _only_itself())
    # OpenMP binds each of its threads (OMP_PROC_BIND) by a number that no filter knows, and ends the process if that
    # fails. Such threads go where the kernel puts them.
    code += _where(_SET_AFFINITY[column], _unless_first_is(0, _PASS_OVER))
    if not programs:
        for numbers in _SIGNALS.values():
            code += _where(numbers[column], _unless_first_is(pid, _FORBID))
    for *both, commands in _BY_COMMAND.values():
        tests = [one for command in commands for one in ((_IF_EQUAL, 0, 1, command), _FORBID)]
        code += _where(both[column], [(_LOAD, 0, 0, _AT_ARGUMENT[1]), *tests, _NUMBER])
    code += _where(_SOCKETPAIR[column], _only_connected_unix())
    if not tcp:
        code += _where(_SOCKET[column], _only_connected_unix())
    else:
        code += _where(_SOCKET[column], _only_of_ranks(accelerators))
    load_flags = (_LOAD, 0, 0, _AT_ARGUMENT[0])
    code += _where(_CLONE[column], [load_flags, (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES), _FORBID, _NUMBER])
    # Its flags lie in memory, which a filter cannot read. The C library then calls clone instead.
    code += _where(_CLONE3, [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)])
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _unless_first_is(value: int, end: _Instruction) -> list[_Instruction]:
    return [(_LOAD, 0, 0, _AT_ARGUMENT[0]), (_IF_EQUAL, 1, 0, value), end, _NUMBER]


def _only_itself() -> list[_Instruction]:
    """A kind of target, where 0 is a process, and which, where 0 is the caller."""
    tests = [one for at in _AT_ARGUMENT[:2] for one in ((_LOAD, 0, 0, at), (_IF_EQUAL, 1, 0, 0), _FORBID)]
    return [*tests, _NUMBER]


def _only_connected_unix() -> list[_Instruction]:
    first, second = _CONNECTED_TYPES
    return [
        (_LOAD, 0, 0, _AT_ARGUMENT[0]),
        (_IF_EQUAL, 1, 0, _AF_UNIX),
        _FORBID,
        (_LOAD, 0, 0, _AT_ARGUMENT[1]),
        (_AND, 0, 0, _TYPE_BITS),
        (_IF_EQUAL, 2, 0, first),
        (_IF_EQUAL, 1, 0, second),
        _FORBID,
        _NUMBER,
    ]


def _only_of_ranks(unix: bool) -> list[_Instruction]:
    """Streams of the internet, and the list of interfaces; `unix`: all of that family as well, as NCCL hands
    descriptors from rank to rank by datagrams."""
    return [
        (_LOAD, 0, 0, _AT_ARGUMENT[0]),
        *([(_IF_EQUAL, 10, 0, _AF_UNIX)] if unix else []),
        (_IF_EQUAL, 5, 0, _AF_INET),
        (_IF_EQUAL, 4, 0, _AF_INET6),
        (_IF_EQUAL, 1, 0, _AF_NETLINK),
        _FORBID,
        (_LOAD, 0, 0, _AT_ARGUMENT[2]),
        (_IF_EQUAL, 4, 3, _NETLINK_ROUTE),
        (_LOAD, 0, 0, _AT_ARGUMENT[1]),
        (_AND, 0, 0, _TYPE_BITS),
        (_IF_EQUAL, 1, 0, _SOCK_STREAM),
        _FORBID,
        _NUMBER,
    ]


def _where(number: int, code: list[_Instruction]) -> list[_Instruction]:
    """Run `code` for the call of this number. It begins with the number loaded, and ends so or returns."""
    return [(_IF_EQUAL, 0, len(code), number), *code]


def _column(machine: str) -> int:
    return list(_ARCHITECTURES).index(machine)
