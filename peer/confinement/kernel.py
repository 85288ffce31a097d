"""Calls to the kernel that Python's standard library does not have. Linux only, but for `forbid_core_dumps`."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38


def syscall(number: int, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call and return its result. Raises OSError."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result = int(call(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def follow_parent(signum: int) -> None:
    """Have the kernel send this signal when the parent's thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def forbid_new_privileges() -> None:
    """Let no program that this process starts gain privileges (set-user-id, file capabilities)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def forbid_core_dumps() -> None:
    """Keep this process's memory, keys included, out of core dumps and from other processes of the same user.

    The limit alone would not do: the kernel ignores it where core dumps are piped to a collector.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)


def allow_own_files() -> None:
    """Give this process its files in /proc back, which a change of its capabilities takes from it."""
    _prctl(_PR_SET_DUMPABLE, 1)


def _prctl(option: int, value: int) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
