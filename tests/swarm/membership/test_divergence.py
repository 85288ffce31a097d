"""Peers of stages that see no NaN end with a pipeline that has diverged; one peer's word is not enough."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from peer.errors import Diverged
from swarm.membership.divergence import DIVERGED, UNSERVED_S, check_stages_converge
from swarm.membership.member_record import MemberRecord
from tests.swarm.placement.test_stage_choice import record

Views = dict[float, dict[str, MemberRecord]]
GONE: dict[str, MemberRecord] = {}
SAID = {"a": record(0, phase=DIVERGED)}


async def ends(views: Views, own: int = 1, for_s: float = 10 * UNSERVED_S) -> bool:
    """Whether a peer of stage `own` ends; `views`: the other peers' records from each second on."""
    began = trio.current_time()

    def view() -> dict[str, MemberRecord]:
        return views[max(at for at in views if at <= trio.current_time() - began)]

    with trio.move_on_after(for_s):
        with pytest.raises(Diverged, match=r"stage 0 could use no step.*lower \[inner\] lr in a new run") as raised:
            await check_stages_converge(view, 2, lambda: own)
        return raised.value.exit_code == 7
    return False


async def test_a_stage_that_nobody_takes_after_that_ends_the_others(autojump_clock: MockClock) -> None:
    assert await ends({0: {"a": record(0)}, 50: SAID, 55: GONE})
    assert not await ends({0: SAID, 5: GONE}, for_s=UNSERVED_S - 1), "others have the time to come"


async def test_a_stage_that_is_left_for_another_reason_is_waited_for(autojump_clock: MockClock) -> None:
    assert not await ends({0: {"a": record(0)}, 50: GONE})


async def test_a_single_peer_is_not_believed_while_another_is_there_or_comes(autojump_clock: MockClock) -> None:
    assert not await ends({0: {**SAID, "b": record(0)}, 5: {"b": record(0)}})
    assert not await ends({0: SAID, 5: GONE, UNSERVED_S - 1: {"b": record(0, phase="starting")}, 100: GONE})
    assert not await ends({0: SAID, 5: GONE}, own=0), "this peer has taken the stage and sees for itself"
