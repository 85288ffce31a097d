"""The parent's side of the "build" program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from peer.data.building.gathering import GatheredText
from peer.errors import ConfigError, ResourceError, WorkerError
from peer.ipc.build_messages import GatherDocuments, LoadBuild
from peer.ipc.messages import Beat, ModelLoaded, WorkerReply
from peer.machine import usable_cores
from peer.plain_text import plain
from peer.worker.process import WorkerProcess, handshake, make_private

_START_S: Final = 600.0
"""For a large tokenizer on a slow disk."""


async def gather_apart(load: LoadBuild, log: Path, is_strict: bool, progress: Callable[[int], None]) -> GatheredText:
    """Have a confined process fill the buckets of a plan, and end it. `progress` takes the bytes of files that are
    behind. Raises ConfigError for a tokenizer, an option or (`is_strict`) a file that is refused, ResourceError if the
    buckets cannot be written, WorkerError."""
    make_private(Path(load.directory))
    worker = WorkerProcess.start(log, Path(load.directory), usable_cores(), ())
    try:
        answer = await handshake(worker, load, _START_S)
        if not isinstance(answer, ModelLoaded):
            raise ConfigError(plain(answer.message))
        await worker.send(GatherDocuments(0, is_strict))
        while (message := await worker.receive()) is not None:
            if isinstance(message, Beat):
                progress(message.ticks)
            elif isinstance(message, WorkerReply):
                return _result(message)
        raise WorkerError(
            f"the process that reads the files ended ({plain(await worker.exit_diagnosis())}): run the command again,"
            " and it continues"
        )
    finally:
        await worker.destroy()


def _result(reply: WorkerReply) -> GatheredText:
    if reply.error is not None:
        kind = ResourceError if reply.error.reason == "full" else ConfigError
        raise kind(plain(reply.error.message))
    return reply.result(GatheredText)
