"""Large buffers come from memory that nothing refers to any more, and no two that are in use share any."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.buffers import KEPT_S, LARGE_BYTES, BufferPool, allocate

MIB = 1 << 20


def address_of(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(3 * MIB)
    at, part = address_of(first), torch.frombuffer(first, dtype=torch.uint8)[5:9]
    del first
    second = pool.take(3 * MIB)
    assert address_of(second) != at, "a tensor still lies there"
    del part
    assert address_of(pool.take(3 * MIB)) == at


def test_memory_of_about_the_size_is_used() -> None:
    pool = BufferPool()
    for size in (40 * MIB, 8 * MIB):
        pool.take(size)
    assert pool.free_bytes == 48 * MIB
    small = pool.take(7 * MIB)
    assert len(small) == 7 * MIB and pool.free_bytes == 40 * MIB
    tiny = pool.take(2 * MIB)
    assert len(tiny) == 2 * MIB and pool.free_bytes == 40 * MIB, "40 MiB are too many for 2"
    del small, tiny


def test_what_is_not_used_for_long_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool()
    pool.take(20 * MIB)
    assert pool.free_bytes == 20 * MIB
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + KEPT_S + 1)
    other = pool.take(2 * MIB)
    assert pool.free_bytes == 0
    del other


@given(st.lists(st.tuples(st.integers(1, 9 * MIB), st.booleans()), max_size=12))
def test_no_two_buffers_share_memory(steps: list[tuple[int, bool]]) -> None:
    pool, held = BufferPool(), list[tuple[int, memoryview]]()
    for number, (size, drops) in enumerate(steps):
        buffer = pool.take(size)
        assert len(buffer) == size and not buffer.readonly
        buffer[0], buffer[-1] = number, number
        held.append((number, buffer))
        if drops:
            held.pop(0)
        del buffer
        assert all(one[0] == one[-1] == mark for mark, one in held)


def test_threads_may_take_and_return_at_once() -> None:
    pool, wrong = BufferPool(), list[int]()

    def use(mark: int) -> None:
        for _ in range(200):
            buffer = pool.take(2 * MIB)
            buffer[:4] = bytes([mark] * 4)
            if buffer[:4] != bytes([mark] * 4):
                wrong.append(mark)
            del buffer
            gc.collect(0)

    threads = [Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pool.free_bytes <= len(threads) * 2 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_buffer_takes_no_more_memory_than_its_bytes() -> None:
    """A slice is two MiB and a little: as two huge pages it would take twice its size."""
    pool, size, count = BufferPool(), 2 * MIB + 2048, 64
    before = _resident_bytes()
    held = [pool.take(size) for _ in range(count)]
    for buffer in held:
        torch.frombuffer(buffer, dtype=torch.uint8).fill_(1)
    assert _resident_bytes() - before < 1.2 * count * size


def _resident_bytes() -> int:
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10


def test_a_small_buffer_is_fresh() -> None:
    allocate(LARGE_BYTES - 1)[:3] = b"abc"
    assert allocate(LARGE_BYTES - 1)[:3] == bytes(3) and len(allocate(0)) == 0
