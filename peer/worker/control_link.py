"""The worker's end of the control socket."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import time
from typing import Any

import msgspec

from peer.catalogue.happening import Happening
from peer.errors import StageReason
from peer.ipc.first_message import FirstMessage
from peer.ipc.messages import (
    Beat,
    Command,
    ControlFrames,
    FromWorker,
    Stop,
    WorkerEvent,
    frame,
    refusal_of,
    reply_to,
)

_BEAT_S = 1.0


class ControlLink:
    """Queues incoming commands in `commands` and sends messages. Stops are noted on arrival, also for commands that
    have not begun."""

    def __init__(self, sock: socket.socket) -> None:
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ticks = 0
        self._socket = sock
        self._sending = threading.Lock()
        self._stops: dict[int, int] = {}  # command id -> the steps it makes at least; both threads write single entries
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FirstMessage)
        self._frames = ControlFrames()

    def receive_load(self) -> FirstMessage:
        """Wait for the first message."""
        bodies: list[bytes] = []
        while not bodies:
            bodies = self._receive()
        message = self._decoder.decode(bodies[0])  # the parent sends no more before the answer
        assert isinstance(message, FirstMessage)
        return message

    def takes(self, commands: Any) -> None:
        """Set the type, or union of types, of the commands to come."""
        self._decoder = msgspec.msgpack.Decoder(Stop | commands)

    def listen(self) -> None:
        """Queue commands and send a beat every second, until the parent is gone. Runs in its own thread."""
        next_beat = time.monotonic()
        while True:
            wait_s = max(0.0, next_beat - time.monotonic())
            readable, _, _ = select.select([self._socket], [], [], wait_s)
            if readable:
                messages = [self._decoder.decode(body) for body in self._receive()]
                # Stops first: this thread may pause between two messages, and the command would make steps meanwhile.
                for message in sorted(messages, key=lambda message: not isinstance(message, Stop)):
                    self._take(message)
            if time.monotonic() >= next_beat:
                self.send(Beat(self.ticks))
                next_beat = time.monotonic() + _BEAT_S

    def is_stopped(self, command_id: int, steps: int) -> bool:
        """Whether a command that has made `steps` steps must end now."""
        after_steps = self._stops.get(command_id)
        return after_steps is not None and steps >= after_steps

    def forget_stops(self, before_id: int) -> None:
        """Forget the stops of finished commands: ids grow, and the commands run in order."""
        for old in [id for id in tuple(self._stops) if id < before_id]:
            del self._stops[old]

    def reply(self, command: Command, body: Any = None) -> None:
        """Answer the command with its result."""
        self.send(reply_to(command, body))

    def refuse(self, command: Command, message: str, reason: StageReason) -> None:
        """Answer the command with a refusal."""
        self.send(refusal_of(command, message, reason))

    def emit(self, event: str | Happening, /, **fields: str | int | float | bool | None) -> None:
        """Have the network process emit an event."""
        name, fields = (event, fields) if isinstance(event, str) else event.stream_form()
        self.send(WorkerEvent(name, fields))

    def send(self, message: FromWorker) -> None:
        with self._sending:
            try:
                self._socket.sendall(frame(message))
            except OSError:
                os._exit(0)  # the parent is gone

    def close(self) -> None:
        """Close the socket, in a fork that answers to another one."""
        self._socket.close()

    def _take(self, message: Stop | Command) -> None:
        if isinstance(message, Stop):
            self._stops[message.id] = min(message.after_steps, self._stops.get(message.id, message.after_steps))
        else:
            self.commands.put(message)

    def _receive(self) -> list[bytes]:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # the parent is gone: no clean-up may keep an orphan alive
        return list(self._frames.feed(data))
