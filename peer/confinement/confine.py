"""Confinement of the calling process, step by step, and what of it this system has."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from peer.confinement import kernel
from peer.confinement.grants import Grants
from peer.confinement.landlock import landlock_abi, restrict_files
from peer.confinement.seccomp import restrict_calls

SWITCH: Final = "BARNRAISE_SANDBOX"
"""The variable that, set to "off", leaves out Landlock and seccomp."""
COMPILE_THREADS: Final = "TORCHINDUCTOR_COMPILE_THREADS"
NOT_HERE: Final = "not on this system"


class Restriction(msgspec.Struct, frozen=True):
    """One part of the confinement."""

    name: str
    in_force: bool
    detail: str
    """Its extent, or why it is not in force."""


def confine(grants: Grants) -> tuple[Restriction, ...]:
    """Restrict this process, for good, as far as this system can. Call it while there is only one thread, as Landlock
    holds for the calling thread and those that it starts."""
    done = [_attempt("core_dumps", kernel.forbid_core_dumps, "forbidden", everywhere=True)]
    done.append(_attempt("privileges", kernel.forbid_new_privileges, "no new ones"))
    if os.environ.get(SWITCH) == "off":
        return (*done, *(Restriction(name, False, f"{SWITCH}=off") for name in ("landlock", "seccomp")))
    files = _attempt("landlock", lambda: restrict_files(grants.rules(), tcp=grants.tcp), f"ABI {landlock_abi()}")
    if files.in_force and grants.compiles and grants.accelerators:
        # A process of the compiler's pool could not open the GPU: /proc/self is another folder there, where the driver
        # may not name its threads. Torch reads this as it is imported.
        os.environ.setdefault(COMPILE_THREADS, "1")
    extent = "in force, but for programs (--compile)" if grants.compiles else "in force"
    allowed = {"programs": grants.compiles, "tcp": grants.tcp, "accelerators": grants.accelerators}
    calls = _attempt("seccomp", partial(restrict_calls, **allowed), extent)
    return (*done, files, calls)


def _attempt(name: str, restrict: Callable[[], None], extent: str, *, everywhere: bool = False) -> Restriction:
    if sys.platform != "linux" and not everywhere:
        return Restriction(name, False, NOT_HERE)
    try:
        restrict()
    except OSError as error:
        absent = error.errno in (errno.ENOSYS, errno.EOPNOTSUPP)
        return Restriction(name, False, NOT_HERE if absent else str(error.strerror))
    return Restriction(name, True, extent)
