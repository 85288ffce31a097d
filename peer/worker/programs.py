"""The programs that a worker process can run, by name."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from peer.errors import ConfigError
from peer.ipc.messages import LoadModel
from peer.worker.control_link import ControlLink
from peer.worker.corpus_worker import CorpusWorker
from peer.worker.stage_worker import StageWorker
from peer.worker.train_worker import TrainWorker


class Program(Protocol):
    """A worker's side of a set of commands. The constructor loads and sends ModelLoaded; it raises ConfigError for a
    configuration that does not work on this machine."""

    commands: ClassVar[Any]
    """The type, or union of types, of the commands that the program takes."""

    def __init__(self, link: ControlLink, load: LoadModel) -> None: ...

    def run(self) -> None:
        """Serve commands until the process is ended."""
        ...


PROGRAMS: dict[str, type[Program]] = {"train": TrainWorker, "stage": StageWorker, "corpus": CorpusWorker}


def find_program(name: str) -> type[Program]:
    """Return the program of this name. Raises ConfigError if there is none."""
    if name not in PROGRAMS:
        raise ConfigError(f"no worker program is named {name!r}: choose one of {', '.join(sorted(PROGRAMS))}")
    return PROGRAMS[name]
