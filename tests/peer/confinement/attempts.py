"""What an attacker inside a worker tries on other processes, files and the network. Run as a module, this file is a
process that confines itself as a worker does, tries all, and prints how each ended."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from peer.confinement import confine, landlock
from peer.confinement.grants import Grants
from peer.confinement.private_network import enter_network

LIBC: Final = ctypes.CDLL(None, use_errno=True)
ARM: Final = platform.machine() == "aarch64"


class Targets(msgspec.Struct, frozen=True):
    """What an attacker would reach. All belong to the same user."""

    folder: str
    """With a file `key`, a file `text` that may be read, and a socket `agent` that listens."""
    victim: int
    """Another process."""
    port: int
    """Where something listens on loopback."""


@contextmanager
def open_targets(folder: Path) -> Iterator[Targets]:
    """Make what the attempts are made on."""
    for name in ("key", "text"):
        (folder / name).write_text("text")
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim,
        socket.socket(socket.AF_UNIX) as agent,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        agent.bind(str(folder / "agent"))
        agent.listen()
        yield Targets(str(folder), victim.pid, listener.getsockname()[1])
        victim.kill()


REFUSED: Final = {"EACCES", "EPERM"}
NO_WAY: Final = {"cores": {"nothing"}, "port of the machine": REFUSED | {"ECONNREFUSED"}}
"""Attempts that end in another way where they are refused: in a network of its own, nothing listens at a port."""
NO_USER: Final = 2_000_000_000
"""Of whom no process is: as root, the attempt would change the priority of the whole machine."""
BY_LANDLOCK: Final = {"read", "list", "write", "cut", "memory", "environment"}
"""What no filter of calls can refuse, as it sees no path."""


def came_through(ended: dict[str, str]) -> set[str]:
    """Return the attempts that were not refused."""
    return {name for name, how in ended.items() if how not in NO_WAY.get(name, REFUSED)}


def outcomes(targets: Targets) -> dict[str, str]:
    """Return how each attempt ended: "done" or the name of the error."""
    folder, victim = Path(targets.folder), targets.victim
    key, text = folder / "key", folder / "text"
    with open(text) as file:  # before there can be no descriptors
        attempts: dict[str, Callable[[], object]] = {
            # files
            "read": lambda: key.read_text(),
            "list": lambda: os.listdir(folder),
            "write": lambda: text.write_text("x"),
            "cut": lambda: os.truncate(text, 0),
            "mode": lambda: os.chmod(key, 0o600),
            "mode of an open file": lambda: os.fchmod(file.fileno(), 0o600),
            "times": lambda: os.utime(key, (1, 1)),
            "times of an open file": lambda: os.utime(file.fileno(), (1, 1)),
            "attribute": lambda: os.setxattr(key, "user.x", b"x"),
            "names that come": lambda: watch(folder),
            "notes of a folder": lambda: fcntl.fcntl(os.open(folder, os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE),
            "all files": lambda: call("fanotify_init", 0, 0),
            # other processes
            "limits": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64)),
            "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
            "priority of all": lambda: os.setpriority(os.PRIO_USER, NO_USER, 0),
            "scheduler": lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0)),
            "scheduling": lambda: os.sched_setparam(victim, os.sched_param(0)),
            "attributes": lambda: number(274 if ARM else 314, victim, None, 0),
            "disk": lambda: number(30 if ARM else 251, 1, victim, 3 << 13),
            "pages": lambda: number(239 if ARM else 279, victim, 0, None, None, None, 0),
            "signal": lambda: os.kill(victim, 0),
            "signal to a thread": lambda: number(131 if ARM else 234, victim, victim, 0),
            "signal to a thread by its number": lambda: number(130 if ARM else 200, victim, 0),
            "signal to all": lambda: os.kill(-1, 0),
            "signal by descriptor": lambda: signal.pidfd_send_signal(os.pidfd_open(victim), 0),
            "signal of a file": lambda: fcntl.fcntl(file, fcntl.F_SETOWN, victim),
            "memory": lambda: Path(f"/proc/{victim}/mem").open("rb").close(),
            "environment": lambda: Path(f"/proc/{victim}/environ").read_bytes(),
            "trace": lambda: call("ptrace", 16, victim, 0, 0),
            # what processes share by names
            "shared memory": lambda: call("shmctl", call("shmget", 0, 4096, 0o600), 0, None),
            "semaphores": lambda: call("semctl", call("semget", 0, 1, 0o600), 0, 0),
            "messages": lambda: call("msgctl", call("msgget", 0, 0o600), 0, None),
            "queue": open_queue,
            "key ring": lambda: number(217 if ARM else 248, b"user", b"x", b"x", 1, -3),
            # the network
            "port of the machine": lambda: socket.create_connection(("127.0.0.1", targets.port), 5).close(),
            "unix socket": lambda: unix(socket.SOCK_STREAM, folder),
            "unix datagrams": lambda: unix(socket.SOCK_DGRAM, folder),
            "internet datagrams": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
            "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
            "events of the kernel": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15).close(),
            # programs and rights
            "program": lambda: os.execv("/nowhere", ["/nowhere"]),
            "namespace": lambda: call("unshare", 0x10000000),
        }
        return {name: outcome(attempt) for name, attempt in attempts.items()} | {"cores": cores(victim)}


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def call(name: str, *arguments: Any) -> int:
    result = int(getattr(LIBC, name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def number(call_number: int, *arguments: Any) -> int:
    return call("syscall", ctypes.c_long(call_number), *arguments)


def open_queue() -> None:
    """A queue outlives its process, and a user has room for ten: taken away at once."""
    name = f"/barnraise-{os.getpid()}".encode()
    queue = call("mq_open", name, os.O_CREAT | os.O_RDWR, 0o600, None)
    call("mq_unlink", name)
    os.close(queue)


def watch(folder: Path) -> None:
    os.close(call("inotify_init1", 0))
    call("inotify_add_watch", call("inotify_init1", 0), os.fsencode(folder), 0x100)


def unix(kind: socket.SocketKind, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        if kind == socket.SOCK_STREAM:
            sock.connect(str(folder / "agent"))


def cores(victim: int) -> str:
    """Move another process to the first core. That seems to succeed, so it is looked at."""
    before = os.sched_getaffinity(victim)
    os.sched_setaffinity(victim, {min(before)})
    return "done" if os.sched_getaffinity(victim) != before else "nothing"


def main() -> None:
    grants, targets, abi, network = json.loads(sys.argv[1])
    enter_network(network)
    if abi is not None:
        held = min(abi, landlock.landlock_abi())
        landlock.landlock_abi = confine.landlock_abi = lambda: held  # type: ignore[attr-defined]
    folder = Path(targets["folder"])
    confine.confine(Grants(private=str(folder / "own"), readable=(str(folder / "text"),), **grants))
    sys.stdout.write(json.dumps(outcomes(Targets(**targets))))


if __name__ == "__main__":
    main()
