"""How long a call takes on processors that nothing else uses: what caller and callee spend on it, and on whatever else
the callee does meanwhile. Other processes of a busy machine do not count."""

from __future__ import annotations

import os
import time

import msgspec

from peer.net.method import Call, Method


class Ask(msgspec.Struct, frozen=True):
    pass


class Clock(msgspec.Struct, frozen=True):
    pid: int
    cpu_s: float
    """The processor time of the answering process at its answer."""


CLOCK = Method("test/clock", Ask, Clock, access="open")


async def clock(call: Call[Ask]) -> Clock:
    return Clock(os.getpid(), time.process_time())


def cpu_s(pid: int) -> float:
    """Return the processor time of any process: the same clock as its own `time.process_time`."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED, see clock_getcpuclockid(3)
