"""A process that has imported what peers and their workers need, and forks them: `import torch` and libp2p were half of
the processor time of the tests with processes.

What is forked is a process like any other: a child of the one that asked, with the arguments, environment, files,
session and signals that it would have. What `exec` alone gives, a command line and an environment in /proc, it lacks.
The tests of the commands' and the workers' own start, and the soak's of a quickstart, start programs as users do.
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

MARK: Final = "BARNRAISE_HARNESS"
"""The variable that names the group of a process; the first letters of its value are its name in /proc."""
MARK_LETTERS: Final = 15
WORKER: Final = "peer.worker.main"
LIBC: Final = ctypes.CDLL(None)
_PRELOADED: Final = (
    "cli.commands.coordinate",
    "cli.commands.join",
    "cli.main",
    "cli.commands.serve",
    "cli.demo.child_processes",
    "peer.worker.block_worker",
    "peer.worker.main",
    "peer.worker.stage_worker",
    "peer.worker.train_worker",
    "numpy.random",
    "swarm.coordinator.coordinated_group",
    "swarm.coordinator.coordinator",
    "swarm.coordinator.create_run",
    "swarm.serving.peer",
    "swarm.training.peer",
    "torch.fx.experimental.symbolic_shapes",  # with sympy, by the first gradient that a stage is given
)
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_CLONE_NEWNET: Final = 0x40000000
_REQUEST_MAX: Final = 1 << 18
_FILES_MAX: Final = 64


@dataclass(frozen=True)
class Start:
    """A process to start: `python -m MODULE ARGUMENTS`. The files that are sent beside it become `targets`.

    `namespace`: of the network, by the name that `ip netns` gave it; "" for that of the server.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    parent: int
    targets: list[int]
    namespace: str = ""


def serve(sock: socket.socket) -> None:
    """Fork a process for each request, until the other end is closed."""
    if (job := _next_job(sock)) is None:
        return
    start, files = job
    code: object = 1
    try:
        _become(start, files)
        _run(start.module)
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:  # noqa: BLE001  as the interpreter does with what a program lets through
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)  # the parent's handlers of the end are not for its children


def _run(module: str) -> None:
    if module == WORKER:
        sys.modules[module].main()
        return
    from tests.support.forking.forked import forked_children, forked_workers, serve_own_forks

    serve_own_forks()
    with forked_workers(), forked_children():
        if module in sys.modules:
            sys.modules[module].main()
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)


def _next_job(sock: socket.socket) -> tuple[Start, list[int]] | None:
    """Fork for each request; return in each of these processes, with what it is for, and here at the end, with None."""
    while True:
        body, rights, _, _ = sock.recvmsg(_REQUEST_MAX, socket.CMSG_SPACE(_FILES_MAX * 4))
        if not body:
            return None
        files = array.array("i")
        for _, _, data in rights:
            files.frombytes(data)
        read, write = os.pipe()
        middle = os.fork()
        if not middle:
            if os.fork():
                os._exit(0)
            os.setsid()  # before anybody knows it: the one that asked may kill its group at once
            os.write(write, str(os.getpid()).encode())
            return Start(**json.loads(body)), files.tolist()
        os.waitpid(middle, 0)  # its child is now that of the one that asked, who is the next "subreaper" up
        sock.send(os.read(read, 64))
        for file in (read, write, *files):
            os.close(file)


def _become(start: Start, files: list[int]) -> None:
    """Turn this process, just forked, into what was asked for."""
    if start.namespace:
        _enter_network(start.namespace)  # first: a thread or a socket would stay where it was made
    while os.getppid() != start.parent:  # the kernel gives it its parent while the server goes on
        if not os.path.exists(f"/proc/{start.parent}"):
            os._exit(1)  # it died meanwhile
        time.sleep(0.001)
    die_with_parent()
    highest = max([*files, *start.targets]) + 1
    moved = [os.dup2(file, highest + n) for n, file in enumerate(files)]
    for file, target in zip(moved, start.targets, strict=True):
        os.dup2(file, target)
    for file in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *start.targets}:
        with suppress(OSError):  # that of the listing is gone
            os.close(file)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    LIBC.prctl(_PR_SET_NAME, start.environment.get(MARK, "")[:MARK_LETTERS].encode())
    sys.argv = [start.module, *start.arguments]
    _read_environment_again()
    gc.enable()


def _enter_network(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as network:
        if LIBC.setns(network.fileno(), _CLONE_NEWNET):
            raise OSError(f"cannot enter the network namespace {namespace}")


def _read_environment_again() -> None:
    """Do again what torch and ours do with variables when they are imported."""
    import torch

    from peer import faults

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    importlib.reload(faults)


def die_with_parent() -> None:
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    gc.disable()
    for name in _PRELOADED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has but the thread that forked"
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    from tests.support.forking.server import main as serve_first  # not this module's: one process has one of each

    serve_first()
