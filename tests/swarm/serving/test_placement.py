"""Which blocks a server takes: the worst served ones, without leaving any alone, and without restlessness."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from peer.ipc.span import Span
from swarm.inference.record import ServerRecord
from swarm.serving.placement import STAY_S, PlacementView, better_blocks, block_rates, choose_blocks
from tests.swarm.inference.test_route import NOW, server


def others(*spans: tuple[int, int]) -> dict[str, ServerRecord]:
    return {f"p{i}": server(first, end) for i, (first, end) in enumerate(spans)}


def surely() -> float:
    """A chance at which a server moves wherever it has a reason."""
    return 0.0


def test_blocks_without_a_server_come_first() -> None:
    assert choose_blocks(PlacementView(8, {}), 3, surely).count == 3
    assert choose_blocks(PlacementView(8, others((0, 4))), 4, surely) == Span(4, 8, 8)
    assert choose_blocks(PlacementView(8, others((0, 3), (5, 8))), 2, surely) == Span(3, 5, 8)
    assert choose_blocks(PlacementView(8, others((0, 8))), 99, surely) == Span.whole(8)


def test_equals_end_where_another_ones_blocks_begin() -> None:
    view = PlacementView(12, others((0, 4), (4, 8), (8, 12)))
    assert {choose_blocks(view, 4, random.Random(seed).random).first for seed in range(20)} == {0, 4, 8}


@given(st.lists(st.integers(1, 6), min_size=4, max_size=30), st.integers(0, 1 << 30))
def test_servers_that_come_one_after_the_other_cover_all_blocks(rooms: list[int], seed: int) -> None:
    chance, present = random.Random(seed).random, dict[str, ServerRecord]()
    for number, room in enumerate(rooms):
        before = block_rates(PlacementView(8, present))
        span = choose_blocks(PlacementView(8, present), room, chance)
        assert min(before[block] for block in span.blocks) == min(before), "the worst block is among them"
        present[f"p{number}"] = server(span.first, span.end, step_ms=float(span.count))
    if sum(rooms) >= 16:
        assert min(block_rates(PlacementView(8, present))) > 0


def test_a_server_moves_to_blocks_that_lost_theirs_but_not_at_once() -> None:
    mine = server(0, 4, since=NOW - STAY_S - 1)
    view = PlacementView(8, others((0, 4)))
    assert better_blocks(view, mine, 4, NOW, surely) == Span(4, 8, 8)
    young = server(0, 4, since=NOW - STAY_S + 1)
    assert better_blocks(view, young, 4, NOW, surely) is None
    assert better_blocks(view, server(0, 4, since=1.0, pinned=True), 4, NOW, surely) is None


def test_no_move_leaves_more_blocks_alone_or_a_block_for_speed() -> None:
    mine = server(0, 4, since=1.0)
    assert better_blocks(PlacementView(8, others((4, 8))), mine, 4, NOW, surely) is None
    assert better_blocks(PlacementView(8, others((1, 4), (4, 8))), mine, 4, NOW, surely) is None
    assert better_blocks(PlacementView(8, others((0, 4), (4, 8))), mine, 4, NOW, surely) is None, "one spare is too few"


def test_one_moves_at_a_time() -> None:
    mine, on_its_way = server(0, 4, since=1.0), server(4, 8, ready_at=NOW + 30)
    assert better_blocks(PlacementView(8, {**others((0, 4)), "mover": on_its_way}), mine, 4, NOW, surely) is None


def test_a_small_gain_moves_nobody_else() -> None:
    mine = server(0, 4, since=1.0)
    view = PlacementView(8, others((0, 4), (4, 8), (4, 8)))
    assert better_blocks(view, mine, 4, NOW, surely) is None
