"""What a mutation must not do: raise what no caller expects, take seconds of CPU, or leave memory behind."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trio

from peer.errors import BarnraiseError

SEED = int(os.environ.get("FUZZ_SEED", "1"))
"""Another value makes other mutations."""
SECONDS_MAX = 5.0
"""CPU of one mutation. tests/fuzz/conftest.py has a soak look closer."""
SOAK_SECONDS_MAX = 0.5
TOLD_CHARS_MAX = 1200
GROWTH_MAX = 48 << 20  # bytes: caches with a bound, not what a leak of 10,000 would be
SMALL_OBJECT_BYTES_MAX = 512  # of what Python allocates by itself; malloc has the rest

MUTATIONS = (pytest.param(40, id="40"), pytest.param(10_000, id="10000", marks=pytest.mark.soak))
"""How many of each kind, as the argument of a test."""


def chance_for(name: str) -> random.Random:
    """Return the source of the mutations of one kind of bytes."""
    return random.Random(f"{SEED}/{name}")


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: bytes of all arenas."""

    _fields_ = [
        (f"_{number}" if name is None else name, ctypes.c_size_t)
        for number, name in enumerate([*4 * [None], "mapped", *2 * [None], "used", *2 * [None]])
    ]


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _MallocInfo


def held() -> int:
    """Return the bytes that are allocated, small objects of Python as if each were of the largest size.

    Not the resident memory: fragments in the arenas of many threads grow by 40 MiB while what is allocated stays."""
    gc.collect()
    info = _mallinfo2()
    return int(info.used) + int(info.mapped) + SMALL_OBJECT_BYTES_MAX * sys.getallocatedblocks()


@contextmanager
def no_growth() -> Iterator[None]:
    """Fail if the block leaves memory allocated."""
    before = held()
    yield
    grown = held() - before
    assert grown < GROWTH_MAX, f"{grown >> 20} MiB are left (FUZZ_SEED={SEED})"


class LongestStep(trio.abc.Instrument):
    """The most CPU that a task took between two awaits: so long the event loop stood still, on any machine.

    The task `own`, which makes the mutations, is left out."""

    def __init__(self, own: trio.lowlevel.Task | None = None) -> None:
        self.seconds, self.task = 0.0, ""
        self._own, self._began = own, 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took = time.thread_time() - self._began
        if took > self.seconds and task is not self._own:
            self.seconds, self.task = took, task.name


class Trial:
    """Runs a function on one mutation after another; a failure names the mutation, so that it can be made again."""

    def __init__(
        self, name: str, accepted: tuple[type[BaseException], ...], longest: Callable[[], float] | None = None
    ) -> None:
        """`longest`: how long an event loop has stood still at most; None: all of the call counts."""
        self.name, self.refused, self.taken = name, 0, 0
        self._accepted, self._longest = accepted, longest

    def run(self, number: int, data: bytes, function: Callable[[bytes], object]) -> None:
        """Call it once: it may return, or raise one of the accepted errors, within `SECONDS_MAX` of CPU."""
        began = time.thread_time()
        try:
            function(data)
            self.taken += 1
        except self._accepted as error:
            self.refused += 1
            self._check_told(number, error)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            pytest.fail(f"{self._which(number)} raised {error!r} for {data[:300]!r}")
        took = time.thread_time() - began if self._longest is None else self._longest()
        if took > SECONDS_MAX:
            pytest.fail(f"{self._which(number)} took {took:.2f} s for {len(data)} bytes: {data[:300]!r}")

    def _which(self, number: int) -> str:
        return f"{self.name}, mutation {number} of FUZZ_SEED={SEED},"

    def _check_told(self, number: int, error: BaseException) -> None:
        """Hold errors to a size at which a person, and a log, can take them."""
        if isinstance(error, BarnraiseError) and len(str(error)) > TOLD_CHARS_MAX:
            pytest.fail(f"{self._which(number)} told {len(str(error))} characters: {str(error)[:200]}")
