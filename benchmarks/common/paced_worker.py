"""A stand-in for a compute worker: its inner steps take a set time, and no work of this machine's cores.

Four real workers on two cores would measure the cores. With this one the product's trainers run as they are, beside a
device whose speed is stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import msgspec
import torch
import trio

from peer.ipc.inner_options import InnerRunOptions
from peer.ipc.train_messages import InnerResult
from swarm.protocol.head import Head
from swarm.protocol.round_schedule import RoundSchedule


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a stand-in works: as JSON in a child's environment."""

    step_s: float
    """Seconds an inner step."""
    steps: tuple[int, ...]
    """H of each round; the last number holds for all that follow. Of streaming, one number."""
    fragments: int = 1
    """More than 1: Streaming DiLoCo (arXiv 2501.18512), with the exchange beside the steps."""
    tau: int = 1
    """Of streaming."""


@dataclass(frozen=True)
class PlannedSchedule(RoundSchedule):
    """A schedule whose rounds differ in their steps, so that one run measures several H."""

    planned: tuple[int, ...] = ()
    """H of each round; the last number holds for all that follow."""

    def steps(self, head: Head) -> int:
        return self.planned[min(head.round, len(self.planned) - 1)]


class PacedWorker:
    """What trainers call of `peer.worker.client.WorkerGroup`. `delta` is the product of every round, fp32, shape (P,).

    Steps are paced by the clock from the start of a run: a late wake-up of this process costs no step, as a device of
    its own would go on."""

    def __init__(self, delta: torch.Tensor, step_s: float) -> None:
        self.delta, self.outer = delta, torch.zeros_like(delta)
        self._step_s = step_s
        self._stop_after: int | None = None  # steps of the run under way
        self._stopped = trio.Event()
        self._free_since = trio.current_time()

    async def inner_steps(
        self,
        ranges: list[tuple[int, int]],
        first_step: int,
        deadline_s: float,
        steps: int | None = None,
        *,
        options: InnerRunOptions,
    ) -> InnerResult:
        """Let the time of the steps pass: as many as asked for or as there are samples (one a step), fewer after
        `stop_inner`. Returns the steps and their seconds."""
        began = trio.current_time()
        most = sum(stop - start for start, stop in ranges)
        wanted = most if steps is None else min(steps, most)
        wanted = ceil(min(wanted, deadline_s / self._step_s))
        self._stop_after = None
        while (left_s := began + wanted * self._step_s - trio.current_time()) > 0:
            self._stopped = trio.Event()
            with trio.move_on_after(left_s):
                await self._stopped.wait()
                begun = ceil((trio.current_time() - began) / self._step_s)
                wanted = min(wanted, max(begun, self._stop_after or 0))
        idle_s, self._free_since = began - self._free_since, trio.current_time()
        return InnerResult(wanted, wanted, wanted, 1.0, wanted * self._step_s, 0, idle_s)

    def stop_inner(self, after_steps: int = 0) -> None:
        """Let the run under way end after its present step, but not before `after_steps` steps. Of several stops the
        earliest holds."""
        before = after_steps if self._stop_after is None else self._stop_after
        self._stop_after = min(before, after_steps)
        self._stopped.set()
