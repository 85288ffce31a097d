"""A group whose members are all gone goes on from a state and a proof that another peer has kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import Backup, GroupSetting, open_driven_group


@pytest.mark.parametrize("mode", ["required", "witness"])
async def test_a_peer_with_a_backup_stands_at_its_head(tmp_path: Path, mode: str) -> None:
    """It can prove that head to others from then on, although it was never there."""
    async with open_driven_group(tmp_path, GroupSetting(mode=mode, min_peers=1)) as group:  # type: ignore[arg-type]
        one = await group.enter(deltas)
        await group.until_round(2)
        await group.leave(one)
        kept = one.driver.group.report()
        backup: Backup = ([tensor.clone() for tensor in one.state.tensors], kept.links)
        assert one.state.tree.root == kept.head.state_hash
        group.stop_coordinator.cancel()  # only the proof can lead it there
        another = await group.enter(deltas, backup=backup)
        await group.until(lambda: another.heads)
        assert another.heads[0] == kept.head
        report = another.driver.group.report()
        assert (report.head, report.links) == (kept.head, kept.links)
        assert not another.seen("state_fetched") and not another.seen("refused")


async def test_a_required_coordinator_goes_on_with_a_backup(tmp_path: Path) -> None:
    setting = GroupSetting(mode="required", min_peers=1, agreement={"undo_s": 4.0})
    async with open_driven_group(tmp_path, setting) as group:
        one = await group.enter(deltas)
        await group.until_round(2)
        await group.leave(one)
        kept = one.driver.group.report()
        another = await group.enter(deltas, backup=([tensor.clone() for tensor in one.state.tensors], kept.links))
        await group.until_round(kept.head.round + 2)
        last = another.heads[-1]
        assert last.term > kept.head.term and {member.peer for member in last.members} == {another.peer}
        group.check()
