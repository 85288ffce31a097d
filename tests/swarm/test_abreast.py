"""Where a stage goes on whose replicas were all lost."""

from __future__ import annotations

import msgspec
import pytest

from swarm.chain import Head, genesis
from swarm.coordinator import abreast
from swarm.ledger import Ledger

BATCH = 64


def head_at(number: int, stage: int = 0) -> Head:
    first = genesis(f"group {stage}", bytes([stage]) * 32)
    return msgspec.structs.replace(first, round=number, inner_step=number, ledger=Ledger(cursor=BATCH * number))


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_is_an_epoch_behind_goes_on_from_there(synchronous: bool) -> None:
    for others in ([7], [7, 8], [8], [6, 7]):
        assert abreast(head_at(7), [head_at(number, 1) for number in others], synchronous) == head_at(7)


def test_older_weights_are_of_the_epoch_that_all_others_have_or_keep() -> None:
    kept = head_at(3)
    on = abreast(kept, [head_at(8, 1), head_at(7, 2), head_at(8, 3)], synchronous=True)
    assert (on.round, on.inner_step, on.ledger) == (7, 7, head_at(7).ledger)
    assert (on.run_id, on.state_hash) == (kept.run_id, kept.state_hash)


def test_with_local_steps_the_stage_keeps_its_own_books() -> None:
    kept = head_at(3)
    on = abreast(kept, [head_at(8, 1), head_at(7, 2)], synchronous=False)
    assert (on.round, on.inner_step, on.ledger) == (8, 8, kept.ledger)
