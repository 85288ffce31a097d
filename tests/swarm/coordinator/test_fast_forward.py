"""Where a stage goes on whose replicas were all lost."""

from __future__ import annotations

import msgspec
import pytest

from swarm.coordinator.coordinator import fast_forward
from swarm.protocol.head import Head, genesis
from swarm.protocol.ledger import NUMBERS_END, Ledger

BATCH = 64


def head_at(number: int, stage: int = 0) -> Head:
    first = genesis(f"group {stage}", bytes([stage]) * 32)
    return msgspec.structs.replace(first, round=number, inner_step=number, ledger=Ledger(cursor=BATCH * number))


def with_ledger(head: Head, ledger: Ledger) -> Head:
    return msgspec.structs.replace(head, ledger=ledger)


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_is_an_epoch_behind_goes_on_from_there(synchronous: bool) -> None:
    for others in ([7], [7, 8], [8], [6, 7]):
        assert fast_forward(head_at(7), [head_at(number, 1) for number in others], synchronous, True) == head_at(7)


def test_older_weights_are_of_the_epoch_that_all_others_have_or_keep() -> None:
    kept = head_at(3)
    on = fast_forward(kept, [head_at(8, 1), head_at(7, 2), head_at(8, 3)], synchronous=True, issues=True)
    assert (on.round, on.inner_step, on.ledger) == (7, 7, head_at(7).ledger)
    assert (on.run_id, on.state_hash) == (kept.run_id, kept.state_hash)


def test_with_local_steps_a_later_stage_keeps_its_own_books() -> None:
    kept = head_at(3)
    on = fast_forward(kept, [head_at(8, 1), head_at(7, 2)], synchronous=False, issues=False)
    assert (on.round, on.inner_step, on.ledger) == (8, 8, kept.ledger)


def test_the_first_stage_hands_out_nothing_that_another_has_merged() -> None:
    kept = with_ledger(head_at(3), Ledger(cursor=192, returned=((0, 16), (64, 96))))
    others = [
        with_ledger(head_at(8, 1), Ledger(cursor=512, returned=((8, 16), (64, 80), (256, 320)))),
        with_ledger(head_at(7, 2), Ledger(cursor=448, returned=((0, 16), (64, 128), (240, 300), (400, 416)))),
    ]
    on = fast_forward(kept, others, synchronous=False, issues=True)
    assert (on.round, on.inner_step) == (8, 8)
    assert on.ledger == Ledger(cursor=512, returned=((8, 16), (64, 80), (256, 300)))
    assert (on.run_id, on.state_hash) == (kept.run_id, kept.state_hash)


@pytest.mark.parametrize("cursor", [NUMBERS_END, 1 << 60, NUMBERS_END - 8])
def test_a_stage_that_says_it_has_merged_everything_leaves_the_first_something_to_hand_out(cursor: int) -> None:
    kept = with_ledger(head_at(3), Ledger(cursor=192))
    others = [with_ledger(head_at(8, 1), Ledger(cursor=cursor)), with_ledger(head_at(8, 2), Ledger(cursor=256))]
    on = fast_forward(kept, others, synchronous=False, issues=True)
    assert on.ledger == Ledger(cursor=256)
    assert Ledger(cursor=cursor).after([Ledger(cursor=8)]).cursor == cursor
