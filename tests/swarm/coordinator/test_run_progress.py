"""Where a stage continues that lost all of its replicas."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import trio

from peer.bounds import NUMBERS_END
from swarm.coordinator.run_progress import RunProgress, fast_forward
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Ledger

BATCH = 64


def head_at(number: int, stage: int = 0) -> Head:
    first = genesis(f"group {stage}", bytes([stage]) * 32)
    return msgspec.structs.replace(first, round=number, inner_step=number, ledger=Ledger(cursor=BATCH * number))


def with_ledger(head: Head, ledger: Ledger) -> Head:
    return msgspec.structs.replace(head, ledger=ledger)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_stage_one_epoch_behind_stays_there(synchronous: bool) -> None:
    for others in ([7], [7, 8], [8], [6, 7]):
        assert fast_forward(head_at(7), [head_at(number, 1) for number in others], synchronous, True) == head_at(7)


def test_a_synchronous_stage_goes_to_the_stage_furthest_behind() -> None:
    kept = head_at(3)
    on = fast_forward(kept, [head_at(8, 1), head_at(7, 2), head_at(8, 3)], synchronous=True, dispatches=True)
    assert (on.round, on.inner_step) == (7, 7)
    assert on.ledger == Ledger(head_at(7).ledger.cursor, lost=4 * BATCH), "its weights lack those batches"
    assert (on.run_id, on.state_hash) == (kept.run_id, kept.state_hash)


def test_a_later_stage_with_local_steps_keeps_its_ledger() -> None:
    kept = head_at(3)
    on = fast_forward(kept, [head_at(8, 1), head_at(7, 2)], synchronous=False, dispatches=False)
    assert (on.round, on.inner_step, on.ledger) == (8, 8, kept.ledger)


def test_a_later_stage_makes_the_last_round_of_a_run_itself() -> None:
    """There it settles what it has not merged."""
    others = [head_at(8, 1), head_at(7, 2)]
    for rounds, wanted in ((0, 8), (8, 7), (9, 8)):
        on = fast_forward(head_at(3), others, synchronous=False, dispatches=False, rounds=rounds)
        assert on.round == wanted
    assert fast_forward(head_at(3), others, synchronous=False, dispatches=True, rounds=8).round == 8


def test_the_first_stage_skips_samples_that_another_stage_merged() -> None:
    kept = with_ledger(head_at(3), Ledger(cursor=192, returned=((0, 16), (64, 96))))
    others = [
        with_ledger(head_at(8, 1), Ledger(cursor=512, returned=((8, 16), (64, 80), (256, 320)))),
        with_ledger(head_at(7, 2), Ledger(cursor=448, returned=((0, 16), (64, 128), (240, 300), (400, 416)))),
    ]
    on = fast_forward(kept, others, synchronous=False, dispatches=True)
    assert (on.round, on.inner_step) == (8, 8)
    free = ((8, 16), (64, 80), (256, 300))
    assert on.ledger == Ledger(cursor=512, returned=free, lost=512 - 192 - (8 + 16 + 44) + (16 + 32))
    assert (on.run_id, on.state_hash) == (kept.run_id, kept.state_hash)


@pytest.mark.parametrize("cursor", [NUMBERS_END, 1 << 60, NUMBERS_END - 8])
def test_an_absurd_ledger_of_another_stage_leaves_samples_for_the_first(cursor: int) -> None:
    kept = with_ledger(head_at(3), Ledger(cursor=192))
    others = [with_ledger(head_at(8, 1), Ledger(cursor=cursor)), with_ledger(head_at(8, 2), Ledger(cursor=256))]
    on = fast_forward(kept, others, synchronous=False, dispatches=True)
    assert on.ledger == Ledger(cursor=256, lost=256 - 192)
    assert Ledger(cursor=cursor).after([Ledger(cursor=8)]).cursor == cursor


def test_groups_of_one_run() -> None:
    progress = RunProgress(source="group 1")
    assert progress.completed and progress.peers == 0
    alone = SimpleNamespace(group="group 1", head=head_at(3, 1), peers=2, completed=trio.Event())
    progress.add(alone)
    assert progress.fast_forward(head_at(3, 1)) == head_at(3, 1), "no other group"
    progress.add(SimpleNamespace(group="group 2", head=head_at(8, 2), peers=3, completed=trio.Event()))
    assert (progress.peers, progress.completed) == (5, False)
    on = progress.fast_forward(head_at(3, 1))
    assert (on.round, on.ledger) == (8, head_at(3).ledger.after([head_at(8).ledger]))
    alone.completed.set()
    assert not progress.completed


def test_a_peer_is_known_by_its_membership_of_another_group() -> None:
    progress = RunProgress()
    for stage, peers in enumerate(("ab", "bc")):
        head = msgspec.structs.replace(head_at(1, stage), members=tuple(Member(peer, "1") for peer in peers))
        progress.add(SimpleNamespace(group=f"group {stage}", head=head, peers=2, completed=trio.Event()))
    beside_first = [peer for peer in "abcd" if progress.is_member_beside("group 0", peer)]
    assert beside_first == ["b", "c"]
