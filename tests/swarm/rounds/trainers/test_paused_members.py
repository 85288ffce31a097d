"""A member whose owner has paused it: it holds nobody up, leaves the electorate, follows, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.protocol.head import Member
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import DrivenGroup, DrivenReplica, GroupSetting, open_driven_group

pytestmark = pytest.mark.slow


def pause(replica: DrivenReplica, paused: bool = True) -> None:
    replica.trainer.paused = paused
    replica.driver.group.pause(paused)


def contributors(replica: DrivenReplica, since: int, until: int) -> set[Member]:
    """Return those with work in any of these rounds."""
    merged = [b for head, b in zip(replica.heads, replica.merged, strict=True) if since <= head.round < until and b]
    return {body.member for bodies in merged for body in bodies if body.steps}


async def _until_out(group: DrivenGroup, paused: DrivenReplica, working: list[DrivenReplica]) -> None:
    await group.until(lambda: not any(replica.head.has(paused.driver.me) for replica in working))


async def test_a_paused_member_votes_no_more_after_two_rounds_and_contributes_again(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(work_s=0.1)) as group:
        *working, paused = [await group.enter(deltas) for _ in range(3)]
        me = paused.driver.me
        await group.until_round(2)
        pause(paused)
        since = max(replica.head.round for replica in working)
        await _until_out(group, paused, working)
        leaders = {entry.leader for head in working[0].heads for entry in head.absent if entry.member == me}
        assert leaders, "it was absent, and not thrown out"
        out = working[0].head.round
        await group.until_round(out + 2)
        assert paused.head.round >= out, "it follows"
        assert me not in contributors(working[0], since + 2, out + 1)

        resumed = working[0].head.round
        pause(paused, False)
        await group.until(lambda: me in contributors(working[0], resumed + 1, working[0].head.round + 1))
        await group.until(lambda: working[0].head.has(me))
        group.check()


async def test_a_pair_of_which_one_is_paused_goes_on_without_the_coordinator(tmp_path: Path) -> None:
    """Its vote is needed, so it stays a voter, and its word that it has no work is waited for a moment."""
    async with open_driven_group(tmp_path, GroupSetting(min_peers=2, work_s=0.1)) as group:
        working, paused = [await group.enter(deltas) for _ in range(2)]
        await group.until_round(2)
        group.stop_coordinator.cancel()
        pause(paused)
        await group.until_round(working.head.round + 4)
        group.check()


async def test_the_only_member_hands_over_to_a_newcomer_while_it_is_paused(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(min_peers=1, work_s=0.1)) as group:
        paused = await group.enter(deltas)
        await group.until_round(2)
        pause(paused)
        late = await group.enter(deltas)
        await group.until(lambda: late.head.has(late.driver.me))
        await group.until(lambda: not late.head.has(paused.driver.me))
        group.check()
