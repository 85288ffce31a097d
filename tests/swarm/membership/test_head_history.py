"""The heads that led to a proved one, asked of peers over real sockets: checked by hashing alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from peer.net.method import Call
from swarm.membership.head_history import ask_history
from swarm.protocol.head import Head
from swarm.protocol.messages import HEADS, AskHeads, HeadPage
from swarm.rounds import group_driver
from tests.swarm.membership.test_proven_heads import Client, group_and_client, meet

pytestmark = pytest.mark.slow

ROUNDS = 5


async def serve_pages(stack: AsyncExitStack, client: Client, heads: Sequence[Head]) -> str:
    """Let another peer answer always with these heads; return its id."""
    host = await meet(stack, client)

    async def answer(call: Call[AskHeads]) -> HeadPage:
        return HeadPage(tuple(heads))

    host.rpc.register(HEADS, answer)
    return host.peer_id


async def test_all_that_led_to_a_head_is_told_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_and_client(tmp_path, "witness", ROUNDS) as (group, client):
        member, coordinator = group.members[0].peer, group.coordinator_host.peer_id
        [proven] = await client.asks(member)
        found = await ask_history(client.host, proven.head, [member])
        commits = [head for head in (*found, proven.head) if head.attempt >= 0]
        assert [head.round for head in commits] == [1, 2, 3, 4, 5]
        hashes = [head.hash for head in (*found, proven.head)]
        assert [head.previous for head in (*found, proven.head)] == [group.genesis.hash, *hashes[:-1]]
        assert await ask_history(client.host, proven.head, [coordinator]) == found, "the coordinator keeps them, too"
        monkeypatch.setattr(group_driver, "PAGE_BYTES", 1)
        assert await ask_history(client.host, proven.head, [member]) == found, "page by page"
        later = await ask_history(client.host, proven.head, [member], after=commits[2].hash)
        assert [head.round for head in later] == [4]
        assert await ask_history(client.host, proven.head, [member], heads_max=2) == found[-2:]
        assert await ask_history(client.host, commits[0], [member], after=commits[0].previous) == []
        assert client.penalized == []


async def test_a_false_history_is_told_and_another_peer_is_asked(tmp_path: Path) -> None:
    async with group_and_client(tmp_path, "required", ROUNDS) as (group, client), AsyncExitStack() as stack:
        member = group.members[0].peer
        [proven] = await client.asks(member)
        true = await ask_history(client.host, proven.head, [member])
        last = true[-1]
        forged = msgspec.structs.replace(last, tokens=last.tokens + 1)
        liar = await serve_pages(stack, client, [forged, *true[:-1][::-1]])
        half_liar = await serve_pages(stack, client, [last, forged])
        empty = await serve_pages(stack, client, [])
        assert await ask_history(client.host, proven.head, [liar]) == []
        assert await ask_history(client.host, proven.head, [empty]) == []
        assert await ask_history(client.host, proven.head, [half_liar]) == [last], "what is true of it counts"
        assert client.penalized == [liar, half_liar]
        assert await ask_history(client.host, proven.head, [liar, half_liar, empty, member]) == true


async def test_a_head_that_is_not_known_leads_nowhere(tmp_path: Path) -> None:
    async with group_and_client(tmp_path, "witness", 1) as (group, client):
        member = group.members[0].peer
        [proven] = await client.asks(member)
        unknown = msgspec.structs.replace(proven.head, previous=b"?" * 32)
        assert await ask_history(client.host, unknown, [member, "no peer"]) == [] and client.penalized == []
