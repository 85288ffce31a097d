"""How long a call takes on processors that nothing else uses: what caller and callee spend on it, and on whatever else
the callee does meanwhile. Other processes of a busy machine do not count.

What must cost little is compared with a fixed piece of work at the same moment: a slow or busy machine takes longer for
both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from peer.net.method import Call, Method


class Ask(msgspec.Struct, frozen=True):
    pass


class Clock(msgspec.Struct, frozen=True):
    pid: int
    cpu_s: float
    """The processor time of the answering process at its answer."""


UNITS = 3


def unit_s() -> float:
    """Return the processor time that one unit of work takes here and now: about 10 ms on a usual machine."""
    began = time.process_time()
    for _ in range(UNITS):
        sum(number * number for number in range(100_000))
    return (time.process_time() - began) / UNITS


@contextmanager
def costs_at_most(units: float) -> Iterator[None]:
    """Fail where the block takes more processor time than that many units of work, which are measured after it."""
    began = time.process_time()
    try:
        yield
    finally:
        spent_s = time.process_time() - began
        assert spent_s <= units * unit_s(), f"{spent_s:.3f} s of processor time"


CLOCK = Method("test/clock", Ask, Clock, access="open")


async def clock(call: Call[Ask]) -> Clock:
    return Clock(os.getpid(), time.process_time())


def cpu_s(pid: int) -> float:
    """Return the processor time of any process: the same clock as its own `time.process_time`."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED, see clock_getcpuclockid(3)
