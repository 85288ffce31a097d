"""A trivial worker program that reports its rank, and one that serves blocks badly. Run as a module, this file is a
worker process that knows them."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any, ClassVar

from peer.errors import ConfigError
from peer.ipc.block_messages import LoadBlocks, OpenSession, ToBlocks
from peer.ipc.messages import Command, ModelLoaded
from peer.ipc.train_messages import LoadTrain
from peer.worker import main, programs
from peer.worker.block_worker import BlockWorker
from peer.worker.client import WorkerGroup
from peer.worker.control_link import ControlLink
from tests.peer.confinement.attempts import Targets, outcomes


class WhoAreYou(Command, frozen=True, tag="who"):
    """The result is [rank, world size, process id]."""


class Wait(Command, frozen=True, tag="wait"):
    """Runs until it is stopped. The result is None."""


class Reach(Command, frozen=True, tag="reach"):
    """The result tells how each attempt to leave the worker ended: "done" or the name of the error."""

    targets: Targets


class EchoWorker:
    """Answers each command with its rank. The rank `seed` - 1 refuses to load."""

    commands: ClassVar[Any] = WhoAreYou | Wait | Reach

    def __init__(self, link: ControlLink, load: LoadTrain) -> None:
        if load.seed == load.rank + 1:
            raise ConfigError(f"rank {load.rank} does not load")
        self._link, self._load = link, load
        link.send(ModelLoaded("none", bf16=False, compiled=False))

    def run(self) -> None:
        while True:
            command: WhoAreYou | Wait | Reach = self._link.commands.get()
            if isinstance(command, Wait):
                while not self._link.is_stopped(command.id, 0):
                    self._link.ticks += 1
                self._link.reply(command)
            elif isinstance(command, Reach):
                self._link.reply(command, outcomes(command.targets))
            else:
                self._link.reply(command, [self._load.rank, self._load.layout.size, os.getpid()])


class EchoGroup(WorkerGroup):
    """Commands to echo workers, which run where others train."""

    def who(self) -> WhoAreYou:
        return WhoAreYou(next(self._ids))

    def wait(self) -> Wait:
        return Wait(next(self._ids))

    def reach(self, targets: Targets) -> Reach:
        return Reach(next(self._ids), targets)


class BadBlockWorker(BlockWorker):
    """Serves blocks, but for two sessions."""

    MALFORMED: ClassVar[int] = 1001
    STUCK: ClassVar[int] = 1002

    def _apply(self, message: ToBlocks, payload: memoryview) -> None:
        if isinstance(message, OpenSession) and message.session == self.MALFORMED:
            self._send(b"no record")
        if isinstance(message, OpenSession) and message.session == self.STUCK:
            threading.Event().wait()
        super()._apply(message, payload)


if __name__ == "__main__":
    for kind, find in ((LoadTrain, lambda: EchoWorker), (LoadBlocks, lambda: BadBlockWorker)):
        programs.PROGRAMS[kind] = replace(programs.PROGRAMS[kind], find=find)
    main.main()
