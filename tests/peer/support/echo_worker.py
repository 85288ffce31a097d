"""A trivial worker program that reports its rank. Run as a module, this file is a worker process that knows it."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from peer.errors import ConfigError
from peer.ipc.messages import Command, LoadModel, ModelLoaded
from peer.worker import main, programs
from peer.worker.commands import WorkerCommands
from peer.worker.control_link import ControlLink


class WhoAreYou(Command, frozen=True, tag="who"):
    """The result is [rank, world size, process id]."""


class Wait(Command, frozen=True, tag="wait"):
    """Runs until it is stopped. The result is None."""


class EchoWorker:
    """Answers each command with its rank. The rank `seed` - 1 refuses to load."""

    commands: ClassVar[Any] = WhoAreYou | Wait

    def __init__(self, link: ControlLink, load: LoadModel) -> None:
        if load.seed == load.rank + 1:
            raise ConfigError(f"rank {load.rank} does not load")
        self._link, self._load = link, load
        link.send(ModelLoaded("none", bf16=False, compiled=False))

    def run(self) -> None:
        while True:
            command: WhoAreYou | Wait = self._link.commands.get()
            if isinstance(command, Wait):
                while not self._link.is_stopped(command.id, 0):
                    self._link.ticks += 1
                self._link.reply(command)
            else:
                self._link.reply(command, [self._load.rank, self._load.world_size, os.getpid()])


class EchoGroup(WorkerCommands):
    """Commands to echo workers."""

    program = "echo"

    def who(self) -> WhoAreYou:
        return WhoAreYou(next(self._ids))

    def wait(self) -> Wait:
        return Wait(next(self._ids))


class UnknownGroup(WorkerCommands):
    program = "blocks"


if __name__ == "__main__":
    programs.PROGRAMS["echo"] = EchoWorker
    main.main()
