"""Peers that cannot be dialled take part and merge nothing; votes tell what was measured of links."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarm.protocol.agreement.messages import VoteMessage
from swarm.protocol.shares import CODES_EACH, SHARE_MAX, UNKNOWN
from swarm.rounds.messages import AGREE
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import DrivenReplica, GroupSetting, open_driven_group
from tests.swarm.support.group import schedule_of

pytestmark = pytest.mark.slow

BY_LINK = dataclasses.replace(schedule_of(4), by_link=True)
LARGE = 6_000_000  # values: 2 MB to each owner


def owners_at(replica: DrivenReplica) -> set[str]:
    """Return who owned slices in the last exchange of a replica."""
    return set(next(reversed(replica.actor.exchanges.values())).order.owners)


async def test_a_client_contributes_and_merges_nothing(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(schedule=BY_LINK)) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        everyone = {replica.peer for replica in replicas}
        client, other = replicas[0], replicas[1]
        await group.until_round(2)
        assert owners_at(other) == everyone
        client.host.traversal.set_client(True)
        await group.until_round(other.head.round + 3)
        assert owners_at(other) == everyone - {client.peer}
        merged = other.merged[-1]
        assert merged is not None and {body.member.peer for body in merged} == everyone
        client.host.traversal.set_client(False)
        await group.until_round(other.head.round + 2)
        assert owners_at(other) == everyone
        group.check()


async def test_votes_tell_what_was_measured_of_links(tmp_path: Path) -> None:
    told: list[VoteMessage] = []
    async with open_driven_group(tmp_path, GroupSetting(numel=LARGE, schedule=BY_LINK)) as group:
        replicas = [await group.enter(partial(deltas, numel=LARGE)) for _ in range(3)]
        rpc: Any = replicas[0].host.rpc
        honest = rpc.call

        async def call(peer: str, method: Any, body: Any, *arguments: Any, **options: Any) -> Any:
            if method is AGREE:
                told.extend(message for message in body.messages if isinstance(message, VoteMessage))
            return await honest(peer, method, body, *arguments, **options)

        rpc.call = call
        await group.until_round(4)
    rates = [message.rates for message in told if isinstance(message.rates, bytes)]
    assert rates, "no vote tells any"
    votes = [[vote[at : at + CODES_EACH] for at in range(0, len(vote), CODES_EACH)] for vote in rates]
    assert all(vote.count(bytes((SHARE_MAX, 0))) == 1 and len(vote) == 3 for vote in votes), "its room, for itself"
    # on a busy machine a link may pass too little in one round to be measured
    assert any(UNKNOWN not in vote for vote in votes), "both links are told"
