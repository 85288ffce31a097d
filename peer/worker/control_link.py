"""The worker's end of the control socket."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import time

import msgspec

from peer.ipc import messages as control
from peer.ipc.stage_messages import StageCommand

_BEAT_S = 1.0


class ControlLink:
    """Commands wait in `commands`; stops are noted as they come, even for commands that have not begun."""

    def __init__(self, sock: socket.socket) -> None:
        self.commands: queue.SimpleQueue[control.Command | StageCommand] = queue.SimpleQueue()
        self.ticks = 0
        self._socket = sock
        self._sending = threading.Lock()
        self._stops: dict[int, int] = {}  # command id -> steps it makes at least; both threads write, entry by entry
        self._decoder = msgspec.msgpack.Decoder(control.ToWorker)
        self._frames = control.ControlFrames()

    def receive_load(self) -> control.LoadModel:
        """Wait for the first message."""
        bodies: list[bytes] = []
        while not bodies:
            bodies = self._receive()
        message = self._decoder.decode(bodies[0])  # the parent says nothing more before the answer
        assert isinstance(message, control.LoadModel)
        return message

    def listen(self) -> None:
        """Thread main: queue commands and send a beat every second, until the parent is gone."""
        next_beat = time.monotonic()
        while True:
            wait_s = max(0.0, next_beat - time.monotonic())
            readable, _, _ = select.select([self._socket], [], [], wait_s)
            if readable:
                messages = [self._decoder.decode(body) for body in self._receive()]
                # stops first: this thread may stand still between two, and the command would make more steps meanwhile
                for message in sorted(messages, key=lambda message: not isinstance(message, control.Stop)):
                    self._take(message)
            if time.monotonic() >= next_beat:
                self.send(control.Beat(self.ticks))
                next_beat = time.monotonic() + _BEAT_S

    def is_stopped(self, command_id: int, steps: int) -> bool:
        """Whether a command that has made `steps` steps is to end now."""
        after_steps = self._stops.get(command_id)
        return after_steps is not None and steps >= after_steps

    def forget_stops(self, before_id: int) -> None:
        """Of commands that are done: ids grow, and commands run in order."""
        for old in [id for id in tuple(self._stops) if id < before_id]:
            del self._stops[old]

    def send(self, message: control.FromWorker) -> None:
        with self._sending:
            try:
                self._socket.sendall(control.frame(message))
            except OSError:
                os._exit(0)  # the parent is gone

    def _take(self, message: control.ToWorker) -> None:
        if isinstance(message, control.Stop):
            self._stops[message.id] = min(message.after_steps, self._stops.get(message.id, message.after_steps))
        else:
            assert not isinstance(message, control.LoadModel)
            self.commands.put(message)

    def _receive(self) -> list[bytes]:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # the parent is gone: no clean-up of ours may keep an orphan alive
        return list(self._frames.feed(data))
