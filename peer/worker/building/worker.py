"""The "build" program of a worker: it reads strangers' files and runs a stranger's tokenizer, and fills buckets."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from peer.data.building.gathering import Gathering
from peer.data.building.plan import BuildPlan, read_note, unwritable_out
from peer.data.tokenizer import load_tokenizer
from peer.errors import ConfigError
from peer.ipc.build_messages import GatherDocuments, LoadBuild
from peer.ipc.messages import ModelLoaded
from peer.worker.control_link import ControlLink

_TRIM_THRESHOLD: Final = -1  # of mallopt
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 20


class BuildWorker:
    """Takes one command: to gather all documents."""

    commands: ClassVar[type[GatherDocuments]] = GatherDocuments

    def __init__(self, link: ControlLink, load: LoadBuild) -> None:
        plan = read_note(Path(load.plan), BuildPlan)
        assert plan is not None  # the parent has written it
        _return_memory()
        self._link = link
        self._gathering = Gathering(plan, Path(load.directory), load_tokenizer(load.tokenizer), progress=self._tick)
        link.send(ModelLoaded(device="", bf16=False, compiled=False))

    def run(self) -> None:
        """Serve the command, then wait until the process is ended."""
        while True:
            command = self._link.commands.get()
            self._gathering.is_strict = command.is_strict
            try:
                found = self._gathering.run()
            except ConfigError as error:
                self._link.refuse(command, str(error), "value")
            except OSError as error:
                path = Path(str(error.filename)) if error.filename else self._gathering.folder
                self._link.refuse(command, str(unwritable_out(path, error)), "full")
            else:
                self._link.reply(command, found)

    def _tick(self, size_bytes: int) -> None:
        self._link.ticks = size_bytes


def _return_memory() -> None:
    """Have glibc return large blocks to the kernel, which a worker that computes keeps: here every document has another
    size."""
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
