"""What a round takes of one process: the seconds of its parts, and the peak of memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, Final

import trio

from optim.strategies.interface import RoundInfo
from swarm.state.outer_state import OuterState


class Stopwatch:
    """The seconds of parts of a round: of threads, so that parts may overlap."""

    def __init__(self, state: OuterState) -> None:
        """Measure the encoding, merges, steps and state hashes of that state's rounds, which are coded alike."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By part, from the start on."""
        self._lock = Lock()
        coding = state.strategy.coding(RoundInfo(1, 0, 0.0), state.tensors)
        for owner, name, part in (
            (state.strategy, "encode", "encode"),
            (coding, "merge", "merge"),
            (state.strategy, "apply", "step"),
            (state, "hash_next", "hash"),
        ):
            setattr(owner, name, self._measured(getattr(owner, name), part))

    def _measured(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*arguments)
            finally:
                with self._lock:
                    self.seconds[part] += time.monotonic() - began

        return measured


class PeakMemory:
    """The peaks of this process's memory, in bytes: its own, and with the files that it maps."""

    LOOK_S: Final = 0.02

    def __init__(self) -> None:
        self.own_bytes = 0

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            kinds = status_bytes("RssAnon", "RssShmem")
            self.own_bytes = max(self.own_bytes, int(sum(kinds)))
            await trio.sleep(self.LOOK_S)

    def report(self) -> dict[str, int]:
        return {"own_bytes": self.own_bytes, "peak_bytes": status_bytes("VmHWM")[0]}


def status_bytes(*names: str) -> list[int]:
    """Return these figures of this process's memory, as Linux counts them; 0 for one that it does not know."""
    with suppress(OSError), open("/proc/self/status") as status:
        found = {name: rest for name, _, rest in (line.partition(":") for line in status)}
        return [int(found[name].split()[0]) << 10 if name in found else 0 for name in names]
    return [0] * len(names)
