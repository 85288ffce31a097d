"""How the workers of a group are started and watched, whatever program they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.events import EventLog
from peer.ipc.first_message import FirstMessage

BEHIND_THE_NETWORK: Final = 10
"""The least niceness of a worker: the network process must stay responsive."""


@dataclass(frozen=True)
class WorkerLaunch:
    """A supervisor's knowledge of its workers."""

    directory: Path
    """Takes worker.log."""
    private_folder: Path
    """The one folder that the workers may write."""
    events: EventLog
    open_descriptors: Callable[[], tuple[int, ...]]
    """Called before each start of the group; returns the descriptors that its workers inherit. Raises ResourceError."""
    first_message: Callable[[int], FirstMessage]
    """Returns the first message to a rank of the group that is being started."""
    world_size: int = 1
    """The number of worker processes in the group."""
    threads: int | None = None
    """Per worker; None: an equal share of the cores that this process may use."""
    nice: int = BEHIND_THE_NETWORK
    """The least niceness of the workers; their program may want more."""
    silence_s: float = 15.0
    """A worker silent for this long is hung (stopped, or swapped out) and is killed."""
    stall_s: float = 300.0
    """A worker that makes no step for this long while it has a command is killed."""
    load_timeout_s: float = 600.0
    starts_max: int | None = None
    """The failed starts in a row after which the supervisor gives up; None: never."""
    steps_always: bool = False
    """Whether a worker makes steps even without a command, so that one that makes none is stuck."""
