"""Processes of our own programs, forked from one that has imported all they need (`tests.support.forking.server`)."""

from __future__ import annotations

import array
import atexit
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import IO, Any, Final
from unittest.mock import patch

import psutil

from tests.support.forking.server import LIBC, Start, die_with_parent, serve

File = int | IO[Any] | None
_PR_SET_CHILD_SUBREAPER: Final = 36


class ForkedProcess(subprocess.Popen[Any]):
    """`Popen(["python", "-m", module, *arguments], ...)`, forked instead. `namespace`: see `Start`."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: File = None,
        stdout: File = None,
        stderr: File = None,
        pass_fds: tuple[int, ...] = (),
        text: bool = False,
        cwd: str | os.PathLike[str] | None = None,
        namespace: str = "",
    ) -> None:
        self.args = [sys.executable, "-m", module, *arguments]
        self.stdin, self.stdout, self.stderr = None, None, None
        self.returncode = None
        self._waitpid_lock = threading.Lock()
        self._input, self._communication_started = None, False
        self.text_mode, self._sigint_wait_secs = text, 0.25
        with ExitStack() as theirs:
            files = [self._theirs(n, file, theirs, text) for n, file in enumerate((stdin, stdout, stderr))]
            if stderr == subprocess.STDOUT:
                files[2] = files[1]
            start = Start(
                module,
                list(arguments),
                dict(os.environ if env is None else env),
                str(cwd or os.getcwd()),
                os.getpid(),
                [0, 1, 2, *pass_fds],
                namespace,
            )
            with _beginning:
                server = _server()
            self.pid = server.fork(start, [*files, *pass_fds])
        self._child_created = True

    def _theirs(self, number: int, file: File, theirs: ExitStack, text: bool) -> int:
        """Return the descriptor that becomes the child's file `number`."""
        if file is None or file == subprocess.STDOUT:
            return number
        if file == subprocess.DEVNULL:
            opened = os.open(os.devnull, os.O_RDWR)
            theirs.callback(os.close, opened)
            return opened
        if file != subprocess.PIPE:
            return file if isinstance(file, int) else file.fileno()
        read, write = os.pipe()
        ours, its, mode = (write, read, "wb") if number == 0 else (read, write, "rb")
        theirs.callback(os.close, its)
        end: Any = open(ours, mode)  # noqa: SIM115  closed by who holds the process, as that of Popen is
        if text:
            end = io.TextIOWrapper(end, write_through=number == 0)
        setattr(self, ("stdin", "stdout", "stderr")[number], end)
        return its


class ForkServer:
    """The near end of the socket to a fork server, which is a child of this process."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock, self.pid = sock, pid
        self._lock = threading.Lock()

    def fork(self, start: Start, files: list[int]) -> int:
        """Start a process; return its id."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        # The server forks twice, and the process that was between ends: its child goes to us. No other orphan shall.
        with self._lock:
            LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                self._sock.sendmsg([json.dumps(vars(start)).encode()], rights)
                return int(self._sock.recv(64))
            finally:
                LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


_servers: Final[dict[int, ForkServer]] = {}
_beginning: Final = threading.Lock()


def _server() -> ForkServer:
    """Return the server of this process. The first call starts it."""
    if os.getpid() not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.forking.server", str(theirs.fileno())]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=(theirs.fileno(),))
        _servers[os.getpid()] = ForkServer(ours, process.pid)

        def end() -> None:
            ours.close()
            process.wait()

        atexit.register(end)
    return _servers[os.getpid()]


def children() -> list[psutil.Process]:
    """Return this process's children that run, without its fork server. One that has ended is none of ours: while a
    server forks, the kernel gives us any orphan."""
    server = _servers.get(os.getpid())
    started = [child for child in psutil.Process().children() if server is None or child.pid != server.pid]
    return [child for child in started if _runs(child)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def serve_own_forks() -> None:
    """Fork a server for the processes of this one, which has but one thread and has imported all."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if child := os.fork():
        theirs.close()
        _servers[parent] = ForkServer(ours, child)
        return
    ours.close()
    die_with_parent()
    if os.getppid() == parent:
        serve(theirs)
    os._exit(0)


@contextmanager
def forking(module: str) -> Iterator[None]:
    """Let the processes that this module of ours starts be forked until the block ends."""

    def start(
        command: list[str], *, start_new_session: bool, preexec_fn: object = None, **options: Any
    ) -> ForkedProcess:
        assert command[1] == "-m" and start_new_session
        return ForkedProcess(command[2], *command[3:], **options)

    with patch(f"{module}.subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start})):
        yield


forked_workers: Final = partial(forking, "peer.worker.process")
"""Let the compute workers of this process be forked."""
forked_children: Final = partial(forking, "cli.demo.child_processes")
"""Let the peers that a command starts, a quickstart or one with `--model`, be forked."""
