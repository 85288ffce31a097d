"""A network of a worker group's own, with loopback alone: a namespace that the group's ranks enter before they confine
themselves. So what a rank binds only the others reach, and it reaches only them. Linux only, and not where the system
lets a user make no namespace.

A process made for it, `python -m peer.confinement.private_network`, makes the namespace and ends; the descriptors keep
it. A user other than root makes a namespace of users with it, where the ranks are the same user without capabilities.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.confinement import kernel
from peer.confinement.environment import passed_on

_ROOT: Final = Path(__file__).resolve().parents[2]
_UNSHARE: Final = {"x86_64": 272, "aarch64": 97}
_SETNS: Final = {"x86_64": 308, "aarch64": 268}
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_NEW_USER: Final = 0x10000000
_NEW_NETWORK: Final = 0x40000000
_CAPABILITIES_VERSION: Final = 0x20080522
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_MADE: Final = "made"
_MAKE_S: Final = 20.0


@dataclass(frozen=True)
class PrivateNetwork:
    """Descriptors that a group's ranks inherit to enter their network, in this order: empty where there is none."""

    fds: tuple[int, ...] = ()
    trouble: str = ""
    """Why there is none."""

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self.fds:
            os.close(fd)


MACHINES: Final = PrivateNetwork(trouble="not asked for")
"""The network that all processes of the machine have."""


def open_private_network() -> PrivateNetwork:
    """Make a network. It takes as long as a process takes to start."""
    if sys.platform != "linux" or platform.machine() not in _SETNS:
        return PrivateNetwork(trouble="not on this system")
    environment = {**passed_on(os.environ), "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as made:
        assert made.stdout is not None
        said = made.stdout.readline().strip()
        names = ("net",) if os.geteuid() == 0 else ("user", "net")
        fds: list[int] = []
        if said == _MADE:
            try:
                fds += (os.open(f"/proc/{made.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names)
            except OSError as error:
                PrivateNetwork(tuple(fds)).close()
                fds, said = [], str(error.strerror)
        with suppress(subprocess.TimeoutExpired):  # it ends with its input
            made.communicate(timeout=_MAKE_S)
        made.kill()
    return PrivateNetwork(tuple(fds)) if fds else PrivateNetwork(trouble=said or "the process that makes it has died")


def enter_network(fds: Iterable[int]) -> None:
    """Enter the network whose descriptors this process has inherited. Call it while there is only one thread, before
    anything that a change of the capabilities undoes (the signal at the parent's end). Raises OSError."""
    machine = platform.machine()
    before = os.stat("/proc/self/ns/user").st_ino
    for fd in fds:
        kernel.syscall(_SETNS[machine], fd, 0)
        os.close(fd)
    if os.stat("/proc/self/ns/user").st_ino != before:
        header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
        none = bytes(24)
        kernel.syscall(
            _CAPSET[machine],
            ctypes.create_string_buffer(header, len(header)),
            ctypes.create_string_buffer(none, len(none)),
        )
        kernel.allow_own_files()


def _make() -> None:
    """Make the namespaces, with the interface up. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.syscall(_UNSHARE[platform.machine()], _NEW_NETWORK | (_NEW_USER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _say(what: str) -> None:
    os.write(1, f"{what}\n".encode())  # a pipe to its parent


if __name__ == "__main__":
    try:
        _make()
    except OSError as error:
        _say(str(error.strerror))
    else:
        _say(_MADE)
        sys.stdin.read()
