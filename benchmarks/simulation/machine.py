"""One simulated machine: a device that runs one job at a time, and an uplink that sends one message at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.simulation.clock import VirtualClock
from swarm.pipeline.router import ReplicaRouter


@dataclass(eq=False)
class DeviceCall:
    """One micro-batch sent to one replica; its answer is the gradient. It ends once: answered, failed or given up."""

    micro_batch: int
    stage: int
    caller: Machine
    callee: str
    tried: tuple[str, ...]  # replicas of this stage where this micro-batch failed before
    done: Callable[[], None]  # what the caller does with the gradient
    sent_s: float
    ended: bool = False
    child: DeviceCall | None = None  # the call to the next stage that this one waits for
    parent: DeviceCall | None = None
    queued_s: float = 0.0
    downstream_s: float = 0.0


class Machine:
    """A replica, or a feeder, which only sends and has `stage` -1. `speed`: work units a second."""

    def __init__(
        self, clock: VirtualClock, name: str, stage: int, speed: float, link_bytes_s: float, random: Random
    ) -> None:
        self.clock, self.name, self.stage = clock, name, stage
        self.speed, self.link_bytes_s = speed, link_bytes_s
        self.random = random
        self.router = ReplicaRouter(random.randrange(2**32))
        self.alive = True
        self.frozen = False
        self.ready_s = 0.0  # when it has its stage's state
        self.since_s = 0.0  # when it chose its stage
        self.source: int | None = None
        self.calls: set[DeviceCall] = set()  # it serves these
        self.busy_s = 0.0
        self.work_done = 0.0
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()
        self._running = 0  # counts up; a job from before `drop_jobs` does not complete
        self._idle = True
        self._uplink_free_s = 0.0

    @property
    def waiting(self) -> int:
        """The number of jobs in the queue."""
        return len(self._jobs)

    def compute(self, work: float, then: Callable[[], None], first: bool = False) -> None:
        """Queue a job, before all others if `first`: a backward pass frees what its forward pass holds."""
        (self._jobs.appendleft if first else self._jobs.append)((work, then))
        self._next()

    def transfer_s(self, size_bytes: float, latency_s: float) -> float:
        """Send a message by the uplink; return when it will arrive."""
        self._uplink_free_s = max(self._uplink_free_s, self.clock.now_s) + size_bytes / self.link_bytes_s
        return self._uplink_free_s + latency_s

    def freeze(self) -> None:
        """Stop, as by SIGSTOP: accept messages, and answer none until `thaw`."""
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self._next()

    def drop_jobs(self) -> None:
        """Forget all work: the machine died, or changes its stage."""
        self._jobs.clear()
        self._running += 1
        self._idle = True

    def _next(self) -> None:
        if not self._idle or self.frozen or not self._jobs or not self.alive:
            return
        self._idle = False
        work, then = self._jobs.popleft()
        # Real kernels vary by a few percent; without that, machines could run in lockstep by accident.
        seconds = work / self.speed * self.random.uniform(0.97, 1.03)
        running = self._running
        self.clock.after(seconds, lambda: self._finished(running, work, seconds, then))

    def _finished(self, running: int, work: float, seconds: float, then: Callable[[], None]) -> None:
        if running != self._running or not self.alive:
            return
        if self.frozen:  # a running job stops with the process, and ends some time after `thaw`
            self.clock.after(0.1, lambda: self._finished(running, work, seconds, then))
            return
        self.busy_s += seconds
        self.work_done += work
        self._idle = True
        then()
        self._next()
