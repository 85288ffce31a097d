"""Landlock: the files that this process and its children may still open, and the processes they may signal.

The kernel's set of rights depends on the version of its interface (ABI). A right that it lacks is not restricted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from peer.confinement import kernel

_CREATE_RULESET: Final = 444  # the same numbers on all processors
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION: Final = 1
_PATH_BENEATH: Final = 1

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_MAKE_CHARACTER_DEVICE: Final = 1 << 6
_MAKE_BLOCK_DEVICE: Final = 1 << 11
_TRUNCATE: Final = 1 << 14
_IOCTL_DEVICE: Final = 1 << 15
_FILES_BY_ABI: Final = (13, 14, 15, 15, 16)  # how many of the rights on files ABI 1, 2, ... knows
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE  # the others are of folders
_TCP: Final = 0b11  # bind and connect; from ABI 4
_TCP_ABI: Final = 4
_SCOPES: Final = 0b11  # abstract unix sockets and signals outside; from ABI 6
_SCOPES_ABI: Final = 6

READ: Final = _READ_FILE | _READ_DIR
RUN: Final = READ | _EXECUTE
USE_DEVICE: Final = READ | _WRITE_FILE | _IOCTL_DEVICE
WRITE_FILES: Final = READ | _WRITE_FILE | _TRUNCATE
WRITE: Final = 0xFFFF & ~(_EXECUTE | _MAKE_CHARACTER_DEVICE | _MAKE_BLOCK_DEVICE | _IOCTL_DEVICE)


def landlock_abi() -> int:
    """Return the version of the kernel's interface; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def restrict_files(rules: Iterable[tuple[str, int]], *, tcp: bool = False) -> None:
    """Allow the calling thread, and those that it will start, only what the rules give: pairs of a path and rights
    beneath it. A path that does not exist is passed over. Without `tcp`, bind and connect of TCP are forbidden, too.

    The process must have forbidden new privileges. Raises OSError.
    """
    abi = landlock_abi()
    if not abi:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    files = (1 << _FILES_BY_ABI[min(abi, len(_FILES_BY_ABI)) - 1]) - 1
    network = _TCP if abi >= _TCP_ABI and not tcp else 0
    scopes = _SCOPES if abi >= _SCOPES_ABI else 0
    handled = struct.pack("QQQ", files, network, scopes)
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.create_string_buffer(handled, len(handled)), len(handled), 0)
    try:
        for path, rights in rules:
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(ruleset, path, rights & files)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
    finally:
        os.close(place)
