"""Calls about another group are refused without a penalty, since peers move between groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peer.errors import RemoteError
from peer.events import EventLog
from peer.identity import Identity, sign_body
from peer.net.host import HostConfig, open_host
from peer.net.method import Method
from swarm.protocol import messages as say
from swarm.protocol.head import Member, genesis
from swarm.protocol.plan import PLAN_KIND, Assignment, WorkPlan
from tests.swarm.support.group import open_group


def nothing(peer: str, step: int, assignment: Assignment) -> torch.Tensor:
    return torch.zeros(64)


async def test_calls_for_another_group_are_refused_without_a_penalty(tmp_path: Path) -> None:
    async with (
        open_group(tmp_path, 64) as group,
        group.join(nothing) as replica,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as asker,
    ):
        await asker.connect_address(replica.host.addresses[0], timeout_s=30)
        authority, me = group.authority_host.identity, Member(asker.peer_id, "s")
        elsewhere = genesis("another", bytes(32)).regrouped((me,), 1)
        asks: list[tuple[Method[Any, Any], Any]] = [
            (say.HEAD_REPORT, say.AskHead("another")),
            (say.REQUEST_JOIN, say.JoinRequest(elsewhere.hash, 0, me, (), "another")),
            (say.PREPARE, say.Prepare(elsewhere, 0, {})),
            (say.REGROUP, say.Regroup(sign_body(authority, say.REGROUP_KIND, elsewhere), {})),
        ]
        plan = WorkPlan(elsewhere.hash, 1, 0, (), 1.0)
        work = say.StartRound(sign_body(asker.identity, PLAN_KIND, plan), finish_early=True)
        for method, ask in asks:
            with pytest.raises(RemoteError, match="in another group") as refused:
                await asker.rpc.call(replica.host.peer_id, method, ask, timeout_s=30)
            assert refused.value.code == "RoundError"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replica.engine.run)  # now there is a round that it could be about
            with trio.fail_after(60):
                while replica.engine.phase != "joining":
                    await trio.sleep(0.02)
            with pytest.raises(RemoteError) as refused:
                await asker.rpc.call(replica.host.peer_id, say.START_ROUND, work, timeout_s=30)
            nursery.cancel_scope.cancel()
        assert refused.value.code == "RoundDiscarded"
        assert not replica.seen("peer_penalized")
        for name in ("", "run"):
            answer = await asker.rpc.call(replica.host.peer_id, say.HEAD_REPORT, say.AskHead(name), timeout_s=30)
            assert answer.body.head == group.genesis()
