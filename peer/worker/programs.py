"""The programs that a worker process can run, by name."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from peer.errors import ConfigError
from peer.ipc.block_messages import LoadBlocks
from peer.ipc.messages import FirstMessage
from peer.worker.block_worker import BlockWorker
from peer.worker.control_link import ControlLink
from peer.worker.corpus_worker import CorpusWorker
from peer.worker.stage_worker import StageWorker
from peer.worker.train_worker import TrainWorker


class Program(Protocol):
    """A worker's side of a set of commands. The constructor loads and sends ModelLoaded; it raises ConfigError for a
    configuration that does not work on this machine."""

    commands: ClassVar[Any]
    """The type, or union of types, of the commands that the program takes."""

    def __init__(self, link: ControlLink, load: Any) -> None:
        """`load`: the first message that the program is for."""
        ...

    def run(self) -> None:
        """Serve commands until the process is ended."""
        ...


PROGRAMS: dict[str, type[Program]] = {"train": TrainWorker, "stage": StageWorker, "corpus": CorpusWorker}
"""Of LoadModel."""
BLOCKS: type[Program] = BlockWorker
"""Of LoadBlocks."""


def find_program(load: FirstMessage) -> type[Program]:
    """Return the program that a first message asks for. Raises ConfigError if there is none."""
    if isinstance(load, LoadBlocks):
        return BLOCKS
    if load.program not in PROGRAMS:
        raise ConfigError(f"no worker program is named {load.program!r}: choose one of {', '.join(sorted(PROGRAMS))}")
    return PROGRAMS[load.program]
