"""One worker process as its parent sees it: start, messages, end and exit diagnosis."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import trio

from peer.confinement.environment import passed_on
from peer.confinement.private_network import MACHINES, PrivateNetwork
from peer.decoding import MALFORMED, told
from peer.errors import WorkerError
from peer.events import EventLog
from peer.ipc.first_message import FirstMessage, ToWorker
from peer.ipc.messages import Beat, ControlFrames, FromWorker, ModelLoaded, Rejected, WorkerEvent, frame
from peer.worker.launch import BEHIND_THE_NETWORK

_LOG_MAX_BYTES = 1 << 20
_LOG_TAIL_BYTES = 4096
_MODULE = "peer.worker.main"
_HINTS = {
    "SIGKILL": " (if memory ran out, lower batch_size or seq_len)",
    "SIGPROF": ", as it took more of the processor than it may",
}
# Activations have the same sizes again and again. Memory returned to the kernel after each micro-batch comes back page
# by page of zeros, a tenth of a CPU stage's time. So glibc keeps its memory, in huge pages where the kernel allows
# them.
_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.mmap_threshold=33554432"


class MessageStream:
    """The parent's end of the socket of a worker, which is not trusted."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.fault = ""
        """Why what comes is no message; it comes no more then."""
        self._stream = stream
        self._frames = ControlFrames()
        self._bodies: deque[bytes] = deque()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._sending = trio.Lock()

    @classmethod
    def of(cls, sock: socket.socket) -> MessageStream:
        """Return that of a socket."""
        return cls(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))

    async def send(self, *messages: ToWorker) -> None:
        """Send messages at once. A dead worker gets nothing, and `receive` reports its death."""
        async with self._sending:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._stream.send_all(b"".join(map(frame, messages)))

    async def send_end(self) -> None:
        """Tell the worker that no message follows."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_eof()

    async def receive(self) -> FromWorker | None:
        """Return the next message; None once the worker has closed its end, which it does by dying, or if what it sent
        is no message."""
        while not self._bodies:
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            try:
                self._bodies.extend(self._frames.feed(bytes(data)))
            except ValueError as error:
                self.note_fault(error)
                return None
        try:
            return self._decoder.decode(self._bodies.popleft())
        except MALFORMED as error:
            self.note_fault(error)
            return None

    def note_fault(self, error: Exception) -> None:
        """Note why the worker must end: what it sends is not trusted."""
        self.fault = f"it sent a malformed message ({told(error)}) and was killed"

    async def aclose(self) -> None:
        """Close the socket."""
        await self._stream.aclose()


class WorkerProcess:
    """A live worker process, the leader of its own session. Its stderr goes to `log`."""

    def __init__(self, process: subprocess.Popen[bytes], stream: MessageStream, log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._stream = stream
        self._log = log
        self._destroyed = False

    @classmethod
    def start(
        cls,
        log: Path,
        private: Path,
        threads: int,
        fds: tuple[int, ...],
        nice: int = BEHIND_THE_NETWORK,
        network: PrivateNetwork = MACHINES,
    ) -> WorkerProcess:
        """Start `python -m peer.worker.main` with `fds` inherited. Call it from the thread that runs trio. `private` is
        the worker's own folder, `nice` its least niceness, `network` what it enters.

        trio's open_process does not fit: it forks in a short-lived thread, and the kernel's parent-death signal refers
        to that thread.
        """
        ours, theirs = socket.socketpair()
        environment = _environment(private, threads)
        with theirs, _open_log(log) as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *map(str, (theirs.fileno(), os.getpid(), nice, *network.fds))],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=(theirs.fileno(), *fds, *network.fds),
                start_new_session=True,  # Ctrl-C reaches only the parent, and killpg also ends the compiler's children
                env=environment,
            )
        return cls(process, MessageStream.of(ours), log)

    async def send(self, *messages: ToWorker) -> None:
        """Send messages at once. A dead worker gets nothing, and `receive` reports its death."""
        await self._stream.send(*messages)

    async def receive(self) -> FromWorker | None:
        """Return the next message; None once the worker has ended."""
        return await self._stream.receive()

    def condemn(self, error: Exception) -> None:
        """Kill the worker for data that it sent by other ways than its socket; `receive` then reports its end."""
        self._stream.note_fault(error)
        self._process.kill()

    async def destroy(self) -> None:
        """Kill the worker and its children, reap it and close the socket. Cannot be cancelled; idempotent."""
        if self._destroyed:  # the process id may have been reused
            return
        self._destroyed = True
        with trio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await trio.to_thread.run_sync(self._process.wait)
            await self._stream.aclose()

    async def exit_diagnosis(self) -> str:
        """Kill what is left of the worker and return in one sentence how it ended."""
        if self._stream.fault:
            await self.destroy()
            return self._stream.fault
        with trio.CancelScope(shield=True):
            try:  # it closed its socket: let it die of its own cause
                code: int | None = await trio.to_thread.run_sync(self._process.wait, 1.0)
            except subprocess.TimeoutExpired:
                code = None
        await self.destroy()
        if code is None:
            return "it closed its control socket and stayed"
        if code < 0:
            name = signal.Signals(-code).name
            return f"it was killed by {name}{_HINTS.get(name, '')}"
        return f"it exited with code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        """Return the last line of the log: for a Python error, the error."""
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"see {self._log}"


def _open_log(path: Path) -> BinaryIO:
    """Open a worker's log for what it will write, emptied where it has grown large. A link in its place is removed:
    what it leads to is not ours to write."""
    if path.is_symlink():
        path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    if os.fstat(fd).st_size > _LOG_MAX_BYTES:
        os.truncate(fd, 0)
    return open(fd, "ab")


def make_private(folder: Path) -> None:
    """Make the folder of a worker's own, and its folder of temporary files."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)


def _environment(private: Path, threads: int) -> dict[str, str]:
    """Return the environment of a worker: what it may know of ours, and its own settings."""
    kept = passed_on(os.environ)
    house, inherited, tuned = (
        str(Path(__file__).resolve().parents[2]),
        kept.get("PYTHONPATH"),
        os.environ.get("GLIBC_TUNABLES"),
    )
    return {
        **kept,
        "HOME": str(private),
        "TMPDIR": str(private / "tmp"),
        "PYTHONPATH": house + (os.pathsep + inherited if inherited else ""),
        "PYTHONSAFEPATH": "1",  # a `torch.py` in the user's folder must not be imported
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        "GLIBC_TUNABLES": _MALLOC + (":" + tuned if tuned else ""),  # the last setting wins: the user's
    }


async def handshake(
    worker: WorkerProcess, load: FirstMessage, timeout_s: float, events: EventLog | None = None
) -> ModelLoaded | Rejected:
    """Send the configuration and wait until the worker is ready; `events` gets its events meanwhile. Raises
    WorkerError; the worker is then gone."""
    await worker.send(load)
    message: FromWorker | None = Beat(0)
    with trio.CancelScope(deadline=trio.current_time() + timeout_s) as timeout:
        while isinstance(message, Beat | WorkerEvent):
            if events is not None and isinstance(message, WorkerEvent):
                events.emit(message.name, **message.fields)
            message = await worker.receive()
    if timeout.cancelled_caught:
        await worker.destroy()
        raise WorkerError(f"the compute worker was not ready after {timeout_s:.0f} s: raise load_timeout_s")
    if isinstance(message, ModelLoaded | Rejected):
        return message
    raise WorkerError(f"the compute worker died while loading: {await worker.exit_diagnosis()}")
