"""Rings between two processes: every record comes, whole and in order, however slow the reader is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import WorkerError
from peer.ipc.ring import Ring
from tests.support.forking.forked import ForkedProcess

SIZE = 4096


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring.create(tmp_path, SIZE)
    yield ring
    ring.close()


def test_records_come_in_order_and_their_room_comes_back(ring: Ring) -> None:
    for turn in range(500):
        records = [bytes([turn % 256]) * (turn % 900), b"", b"end"]
        assert all(ring.put(record) for record in records)
        assert [bytes(record) for record in ring.take()] == records
        ring.done()
    assert ring.take() == []


def test_pieces_are_one_record(ring: Ring) -> None:
    assert ring.put(b"head", bytearray(b" and "), memoryview(b"payload"))
    assert [bytes(record) for record in ring.take()] == [b"head and payload"]


def test_a_full_ring_refuses_and_goes_on_later(ring: Ring) -> None:
    count = 0
    while ring.put(bytes(1000)):
        count += 1
    assert count == 4
    assert len(ring.take()) == 4
    assert not ring.put(bytes(1000)), "the reader may still look at them"
    ring.done()
    assert ring.put(bytes(1000))


def test_a_record_that_never_fits_is_refused(ring: Ring) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        ring.put(bytes(SIZE))


def test_a_broken_writer_is_found_out(ring: Ring) -> None:
    """A worker computes on strangers' numbers, so it is not trusted."""
    assert ring.put(b"fine")
    ring._room[:4] = (0x7FFF_FFFF).to_bytes(4, sys.byteorder)
    with pytest.raises(WorkerError, match="its writer is broken"):
        ring.take()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=1500), st.sampled_from(["take", "done"])), max_size=80))
def test_whatever_is_put_and_taken_in_turn(tmp_path_factory: pytest.TempPathFactory, acts: list[bytes | str]) -> None:
    ring = Ring.create(tmp_path_factory.getbasetemp(), SIZE)
    try:
        there: list[bytes] = []
        for act in acts:
            if isinstance(act, bytes):
                if ring.put(act):
                    there.append(act)
            elif act == "take":
                found = [bytes(record) for record in ring.take()]
                assert found == there
                there = []
            else:
                ring.done()
    finally:
        found = []
        ring.close()


@pytest.mark.process
def test_another_process_has_every_record(tmp_path: Path) -> None:
    there, back = Ring.create(tmp_path, SIZE), Ring.create(tmp_path, SIZE)
    records = [os.urandom(1 + (number * 37) % 1200) for number in range(400)]
    fds = [",".join(map(str, ring.fds)) for ring in (there, back)]
    child = ForkedProcess(
        "tests.peer.ipc.ring_child", *fds, str(SIZE), str(len(records)), pass_fds=(*there.fds, *back.fds)
    )
    try:
        sent, got = 0, list[bytes]()
        while len(got) < len(records):
            while sent < len(records) and there.put(records[sent]):
                sent += 1
            # While the ring was full there is no sign of room to wait for: the reader may have made it just now.
            found = [bytes(record) for record in back.take(block=sent == len(records))]
            back.done()
            got += found
            if not found:
                time.sleep(0.001)
        assert got == records
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        there.close()
        back.close()
