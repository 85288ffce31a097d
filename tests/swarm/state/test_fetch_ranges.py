"""A joiner fetches byte ranges of a state: only their chunks travel, each is checked, and the file has holes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st

from peer.checkpoint.hash_tree import chunk_size_for
from peer.net.rpc import Buffer
from swarm.state.messages import StateReply
from swarm.state.ranges import chunks_of, spans_of
from swarm.state.upload_limits import SnapshotLimits
from tests.swarm.support.state_donors import (
    STATE,
    TREE,
    ChunkHandler,
    Joiner,
    arrived_whole,
    bare_host,
    donors,
    flipped,
    joiner,
    odd_donor,
)

__all__ = ["joiner"]

FLAT = torch.cat(STATE)
CHUNK = TREE.chunk_size
RANGES = [(40, 44), (10 * CHUNK - 8, 12 * CHUNK + 4), (TREE.size_bytes - 400, TREE.size_bytes)]
WANTED = {0, 9, 10, 11, 12, len(TREE.hashes) - 1}


def bytes_of(chunks: set[int]) -> int:
    return sum(end - start for start, end in map(TREE.span, chunks))


def counting(asked: list[int], answer: ChunkHandler | None = None) -> ChunkHandler:
    """Return a handler that notes which chunks are asked for."""

    def handler(right: bytes, index: int) -> tuple[StateReply, Buffer]:
        asked.append(index)
        return answer(right, index) if answer is not None else (StateReply("here"), right)

    return handler


async def test_only_the_chunks_of_the_ranges_travel(joiner: Joiner) -> None:
    async with donors(SnapshotLimits()) as [donor]:
        fetched = await joiner.fetch_ranges(RANGES, donor)
        sent = donor.bytes_up
    assert fetched.chunks == WANTED and fetched.donors == {donor.peer_id: bytes_of(WANTED)}
    assert bytes_of(WANTED) < sent < bytes_of(WANTED) + 50_000, "chunks, the list of hashes, handshakes"
    for first, end in RANGES:
        assert torch.equal(fetched.floats(first, end), FLAT[first // 4 : end // 4])


async def test_the_part_file_has_holes(joiner: Joiner) -> None:
    async with donors(SnapshotLimits()) as [donor]:
        await joiner.fetch_ranges(RANGES, donor)
    status = joiner.part_file.stat()
    assert status.st_size == TREE.size_bytes
    assert bytes_of(WANTED) <= status.st_blocks * 512 < bytes_of(WANTED) + CHUNK


async def test_bytes_that_were_not_fetched_are_not_given(joiner: Joiner) -> None:
    async with donors(SnapshotLimits()) as [donor]:
        fetched = await joiner.fetch_ranges(RANGES, donor)
    assert fetched.floats(0, CHUNK).numel() == CHUNK // 4, "the rest of a fetched chunk may be read"
    for first, end in ((CHUNK, CHUNK + 4), (0, 2 * CHUNK), (41, 45), (8 * CHUNK, 10 * CHUNK)):
        with pytest.raises(ValueError, match="not whole floats of the fetched ranges"):
            fetched.floats(first, end)


async def test_writing_to_the_mapped_floats_leaves_the_file(joiner: Joiner) -> None:
    async with donors(SnapshotLimits()) as [donor]:
        fetched = await joiner.fetch_ranges(RANGES, donor)
        fetched.floats(40, 44).zero_()
        again = await joiner.fetch_ranges(RANGES, donor)
    assert again.resumed_bytes == bytes_of(WANTED) and torch.equal(again.floats(40, 44), FLAT[10:11])


async def test_a_wrong_chunk_is_refused(joiner: Joiner) -> None:
    asked: list[int] = []
    async with donors(SnapshotLimits()) as [good], odd_donor(counting(asked, flipped)) as bad:
        fetched = await joiner.fetch_ranges([(0, TREE.size_bytes)], bad, good)
    assert joiner.penalized == {bad.peer_id} and set(fetched.donors) == {good.peer_id} and len(asked) <= 3
    assert torch.equal(fetched.floats(0, TREE.size_bytes), FLAT)


async def test_a_later_fetch_reuses_what_is_there(joiner: Joiner) -> None:
    asked: list[int] = []
    async with odd_donor(counting(asked)) as donor:
        await joiner.fetch_ranges(RANGES, donor)
        assert sorted(asked) == sorted(WANTED)
        asked.clear()
        more = await joiner.fetch_ranges([(9 * CHUNK, 14 * CHUNK)], donor)
        assert sorted(asked) == [13] and more.resumed_bytes == bytes_of({9, 10, 11, 12})
        asked.clear()
        whole = await joiner.fetch(donor)
    assert set(asked) == set(range(len(TREE.hashes))) - WANTED - {13}
    assert arrived_whole(whole) and whole.resumed_bytes == bytes_of(WANTED | {13})
    assert not joiner.part_file.exists()


async def test_an_interrupted_fetch_of_ranges_is_resumed(joiner: Joiner) -> None:
    asked: list[int] = []
    half = trio.CancelScope()

    def until_three(right: bytes, index: int) -> tuple[StateReply, Buffer]:
        if len(asked) == 4:
            half.cancel()
        return StateReply("here"), right

    async with odd_donor(counting(asked, until_three)) as donor:
        with half:
            await joiner.fetch_ranges(RANGES, donor)
        assert half.cancelled_caught
        fetched = await joiner.fetch_ranges(RANGES, donor)
    assert 0 < fetched.resumed_bytes < bytes_of(WANTED)
    assert fetched.resumed_bytes + sum(fetched.donors.values()) == bytes_of(WANTED)


@pytest.mark.parametrize("wrong", [(-4, 8), (8, 8), (8, 4), (0, TREE.size_bytes + 4)])
async def test_ranges_outside_the_state_are_refused(joiner: Joiner, wrong: tuple[int, int]) -> None:
    async with bare_host() as donor:
        with pytest.raises(ValueError, match="is not inside a state"):
            await joiner.fetch_ranges([(0, 4), wrong], donor)
    assert not joiner.part_file.exists()


SIZES = st.integers(1, 10_000_000)


@given(SIZES, st.lists(st.tuples(st.integers(0, 1 << 24), st.integers(0, 1 << 24)), max_size=5))
def test_chunks_cover_the_ranges_and_no_more(size_bytes: int, places: list[tuple[int, int]]) -> None:
    ranges = [(min(a, b) % size_bytes, max(min(a, b) % size_bytes + 1, b % size_bytes)) for a, b in places]
    chunk, chunks = chunk_size_for(size_bytes), chunks_of(size_bytes, ranges)
    for index in range(-(-size_bytes // chunk)):
        overlaps = any(first < (index + 1) * chunk and end > index * chunk for first, end in ranges)
        assert (index in chunks) == overlaps
    spans = spans_of(size_bytes, chunks)
    assert all(first < end <= size_bytes for first, end in spans)
    assert all(before[1] < after[0] for before, after in pairwise(spans)), "joined and in order"
    assert chunks_of(size_bytes, spans) == chunks
