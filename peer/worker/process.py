"""One compute worker as its parent sees it: start, messages, death and post-mortem."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from peer.errors import WorkerError
from peer.ipc import messages as control

_LOG_MAX_BYTES = 1 << 20
_LOG_TAIL_BYTES = 4096
# Activations have the same sizes again and again. Given back to the kernel after each micro-batch they return page by
# page of zeros, a tenth of a CPU stage's time: so glibc keeps what it has, in huge pages where the kernel allows them.
_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.mmap_threshold=33554432"


class WorkerProcess:
    """A live worker process, the leader of a session of its own. Its stderr goes to `log`."""

    def __init__(self, process: subprocess.Popen[bytes], stream: trio.SocketStream, log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._stream = stream
        self._log = log
        self._frames = control.ControlFrames()
        self._bodies: deque[bytes] = deque()
        self._decoder: msgspec.msgpack.Decoder[control.FromWorker] = msgspec.msgpack.Decoder(control.FromWorker)
        self._sending = trio.Lock()
        self._destroyed = False

    @classmethod
    def start(cls, log: Path, threads: int, fds: tuple[int, ...]) -> WorkerProcess:
        """Start `python -m peer.worker.main` with `fds` inherited.

        Not through trio's open_process: that forks in a short-lived thread, and the kernel's parent-death signal
        means the thread. Call it from the thread that runs trio.
        """
        ours, theirs = socket.socketpair()
        house = str(Path(__file__).resolve().parents[2])
        inherited, tuned = os.environ.get("PYTHONPATH"), os.environ.get("GLIBC_TUNABLES")
        environment = {
            **os.environ,
            "PYTHONPATH": house + (os.pathsep + inherited if inherited else ""),
            "PYTHONSAFEPATH": "1",  # a `torch.py` in the user's folder is not ours to import
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "true",
            "GLIBC_TUNABLES": _MALLOC + (":" + tuned if tuned else ""),  # the last word counts: the user's
        }
        grown = log.exists() and log.stat().st_size > _LOG_MAX_BYTES
        with theirs, log.open("wb" if grown else "ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "peer.worker.main", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=(theirs.fileno(), *fds),
                start_new_session=True,  # Ctrl-C is for the parent, and killpg takes the compiler's children too
                env=environment,
            )
        return cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)), log)

    async def send(self, message: control.ToWorker) -> None:
        """Send one message; to a dead worker it goes nowhere, and `receive` tells."""
        async with self._sending:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_all(control.frame(message))

    async def receive(self) -> control.FromWorker | None:
        """The next message, or None once the worker has closed its end, which it does by dying."""
        while not self._bodies:
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._bodies.extend(self._frames.feed(bytes(data)))
        return self._decoder.decode(self._bodies.popleft())

    async def destroy(self) -> None:
        """Kill the worker and its children, reap it and close the socket. Cannot be cancelled; twice is once."""
        if self._destroyed:  # by now its process id may belong to somebody else
            return
        self._destroyed = True
        with trio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await trio.to_thread.run_sync(self._process.wait)
            await self._stream.aclose()

    async def exit_diagnosis(self) -> str:
        """Kill what is left of it and say in one sentence how it ended."""
        with trio.CancelScope(shield=True):
            try:  # it closed its socket: let it finish dying of its own cause
                code: int | None = await trio.to_thread.run_sync(self._process.wait, 1.0)
            except subprocess.TimeoutExpired:
                code = None
        await self.destroy()
        if code is None:
            return "it closed its control socket and stayed"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory? lower batch_size or seq_len)" if name == "SIGKILL" else ""
            return f"it was killed by {name}{hint}"
        return f"it exited with code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        """The last line of its log: for a Python error, the error."""
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"see {self._log}"


async def handshake(
    child: WorkerProcess, load: control.LoadModel, timeout_s: float
) -> control.ModelLoaded | control.Rejected:
    """Send the configuration and wait until the worker is ready. Raises WorkerError; the child is then gone."""
    await child.send(load)
    message: control.FromWorker | None = control.Beat(0)
    with trio.CancelScope(deadline=trio.current_time() + timeout_s) as timeout:
        while isinstance(message, control.Beat):
            message = await child.receive()
    if timeout.cancelled_caught:
        await child.destroy()
        raise WorkerError(f"the compute worker was not ready after {timeout_s:.0f} s: raise load_timeout_s")
    if isinstance(message, control.ModelLoaded | control.Rejected):
        return message
    raise WorkerError(f"the compute worker died while loading: {await child.exit_diagnosis()}")
