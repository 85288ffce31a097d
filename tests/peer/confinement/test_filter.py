"""The filter of system calls, run instruction by instruction as the kernel runs it, for both kinds of processor."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from peer.confinement.seccomp import filter_code

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, FORBIDDEN, MISSING = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
# read, write, mmap, ioctl, futex, openat, clone3's fallback for threads, and exit
NEEDED = {"x86_64": [0, 1, 9, 16, 202, 257, 60], "aarch64": [63, 64, 222, 29, 98, 56, 93]}
EXECVE = {"x86_64": 59, "aarch64": 221}
SOCKET = {"x86_64": 41, "aarch64": 198}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
CONNECT = {"x86_64": 42, "aarch64": 203}
BIND = {"x86_64": 49, "aarch64": 200}
CLONE = {"x86_64": 56, "aarch64": 220}
PTRACE = {"x86_64": 101, "aarch64": 117}
BPF = {"x86_64": 321, "aarch64": 280}
URING = 425
SETPRIORITY = {"x86_64": 141, "aarch64": 140}
PID = 4711
THREAD_FLAGS = 0x3D0F00  # of pthread_create
NEW_USER = 0x10000000


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None, **allowed: bool) -> int:
    """The filter's answer to one call."""
    words = {0: number, 4: ARCHITECTURE[machine] if architecture is None else architecture}
    words |= {16 + 8 * place: argument & 0xFFFFFFFF for place, argument in enumerate((*arguments, 0, 0))}
    code, at, value = filter_code(machine, PID, **allowed), 0, 0
    while True:
        operation, if_true, if_false, k = code[at]
        at += 1
        if operation == 0x06:
            return k
        if operation == 0x20:
            value = words[k]
        elif operation == 0x54:
            value &= k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[operation]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_what_computing_needs_is_allowed(machine: str) -> None:
    for number in NEEDED[machine]:
        assert verdict(machine, number) == ALLOWED
    assert verdict(machine, CLONE[machine], THREAD_FLAGS) == ALLOWED
    assert verdict(machine, 435) == MISSING  # clone3: the C library falls back to clone
    for call in (SOCKET, SOCKETPAIR):
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            assert verdict(machine, call[machine], socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) == ALLOWED


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_what_leads_outside_is_forbidden(machine: str) -> None:
    for number in (EXECVE[machine], CONNECT[machine], PTRACE[machine], BPF[machine], URING):
        assert verdict(machine, number) == FORBIDDEN
    assert verdict(machine, CLONE[machine], THREAD_FLAGS | NEW_USER) == FORBIDDEN
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
        assert verdict(machine, SOCKET[machine], family, socket.SOCK_STREAM) == FORBIDDEN
    for call in (SOCKET, SOCKETPAIR):  # a datagram goes to any address without a connection
        assert verdict(machine, call[machine], socket.AF_UNIX, socket.SOCK_DGRAM) == FORBIDDEN


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_a_process_lowers_its_own_priority_alone(machine: str) -> None:
    assert verdict(machine, SETPRIORITY[machine], os.PRIO_PROCESS, 0, 19) == ALLOWED
    for kind, which in ((os.PRIO_PROCESS, 1), (os.PRIO_PROCESS, PID), (os.PRIO_PGRP, 0), (os.PRIO_USER, 0)):
        assert verdict(machine, SETPRIORITY[machine], kind, which, 19) == FORBIDDEN


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_the_driver_of_a_gpu_names_unix_sockets_alone(machine: str) -> None:
    assert verdict(machine, BIND[machine]) == FORBIDDEN
    assert verdict(machine, BIND[machine], accelerators=True) == ALLOWED
    assert verdict(machine, CONNECT[machine], accelerators=True) == FORBIDDEN
    assert verdict(machine, SOCKET[machine], socket.AF_INET, socket.SOCK_STREAM, accelerators=True) == FORBIDDEN


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_calls_by_other_numbers_are_forbidden(machine: str) -> None:
    i386 = 0x40000003
    assert verdict(machine, NEEDED[machine][0], architecture=i386) == FORBIDDEN
    if machine == "x86_64":
        assert verdict(machine, 0x40000000) == FORBIDDEN  # x32


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_a_compiler_and_a_group_get_what_they_need_and_no_more(machine: str) -> None:
    assert verdict(machine, EXECVE[machine], programs=True) == ALLOWED
    assert verdict(machine, SOCKET[machine], socket.AF_INET, socket.SOCK_STREAM, programs=True) == FORBIDDEN
    assert verdict(machine, SOCKET[machine], socket.AF_INET, socket.SOCK_STREAM, tcp=True) == ALLOWED
    assert verdict(machine, CONNECT[machine], tcp=True) == ALLOWED
    assert verdict(machine, EXECVE[machine], tcp=True) == FORBIDDEN
    for number in (PTRACE[machine], BPF[machine], URING):
        assert verdict(machine, number, programs=True, tcp=True) == FORBIDDEN
