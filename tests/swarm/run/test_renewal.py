"""What a credential gives on a live connection: until it ends, and for as long as it is renewed. Between real hosts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from dht.node import NodeConfig, open_node
from peer.errors import RemoteError
from peer.net.flow.flow import Flow
from peer.net.host import Host
from peer.net.rpc import Method
from swarm.client.session import open_client
from swarm.membership.member_record import MEMBERS
from swarm.run.credentials import CLIENT_MAX_S, CLIENT_S, CLOCK_SKEW_S, Chain, client_link
from swarm.run.gate import Gate
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import serve_run_files
from tests.peer.support.flow_talk import Note, Talk
from tests.swarm.run.test_gate import AUTHORITY, SOON, Word, echo, hosts, invite_to, manifest_of

READ = Method("test.read", Word, Word, access="client")


@dataclass
class Clock:
    """The wall clock of both machines."""

    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pair:
    """The authority of a closed run, and a client that is connected with it by calls and by a flow."""

    clock: Clock
    member: Host
    client: Host
    gate: Gate
    """The client's."""
    theirs: Talk
    """What the member has heard."""
    flow: Flow

    async def read(self) -> str:
        return (await self.client.rpc.call(self.member.peer_id, READ, Word("hi"), timeout_s=SOON)).body.text

    @property
    def ends(self) -> float:
        """When the client's rights end, as the member sees it."""
        return self.member.admissions.ends(self.client.peer_id)


@asynccontextmanager
async def pair(monkeypatch: pytest.MonkeyPatch, *, renews: bool) -> AsyncIterator[Pair]:
    monkeypatch.setattr("peer.net.flow.flows.LOOK_S", 0.01)
    manifest, clock = manifest_of(open_run=False), Clock()
    async with hosts(2, first=AUTHORITY) as (member, client):

        def sign(now: float) -> Chain:
            return (client_link(AUTHORITY, manifest.run_id, client.peer_id, now + CLIENT_S),)

        for host in (member, client):
            monkeypatch.setattr(host.admissions, "_clock", clock)
        Gate(member.rpc, manifest, AUTHORITY, clock=clock)
        chain = sign(clock())
        gate = Gate(client.rpc, manifest, client.identity, chain, clock=clock, renew=sign if renews else None)
        member.rpc.register(READ, echo)
        theirs = Talk()
        member.flows.serve(theirs)
        client.flows.serve(Talk())
        both = Pair(clock, member, client, gate, theirs, await client.flows.open(member.peer_id))
        assert await both.read() == "hi"
        both.flow.send(Note(1))
        await theirs.until(1)
        assert both.ends == clock() + CLIENT_S + CLOCK_SKEW_S
        yield both


async def test_a_client_that_renews_keeps_its_rights_on_live_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, renews=True) as both:
        for number in range(2, 6):
            both.clock.now += CLIENT_S / 2
            await both.gate.renew()
            assert both.ends == both.clock() + CLIENT_S + CLOCK_SKEW_S
            introduce, both.client.rpc.introduce = both.client.rpc.introduce, None  # no call introduces it
            assert await both.read() == "hi"
            both.client.rpc.introduce = introduce
            both.flow.send(Note(number))
            await both.theirs.until(number)
        assert not both.theirs.ended


async def test_a_live_connection_whose_credential_has_ended_has_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, renews=False) as both:
        both.clock.now = both.ends
        await both.gate.renew()  # nothing to renew it from
        assert await both.read() == "hi"
        both.clock.now += 1
        with trio.fail_after(SOON):  # silent: neither end says anything on it
            while both.theirs.ended != ["the peer's credential has ended"]:
                await trio.sleep(0.01)
        assert both.client.is_connected(both.member.peer_id)
        introduce, both.client.rpc.introduce = both.client.rpc.introduce, None
        with pytest.raises(RemoteError, match="has ended: renew it and introduce yourself"):
            await both.read()
        both.client.rpc.introduce = introduce
        with pytest.raises(RemoteError, match="the client's credential ended 2 minutes ago: sign a new one"):
            await both.read()
        assert not both.member.admissions.allows(both.client.peer_id, "client")


async def test_a_flow_outlives_no_credential_by_losing_its_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, renews=False) as both:
        both.member.admissions.revoke(both.client.peer_id)
        both.flow.send(Note(2))
        await both.theirs.until(2)
        both.clock.now += CLIENT_S + CLOCK_SKEW_S + 1
        both.flow.send(Note(3))
        with trio.fail_after(SOON):
            await both.flow.ended.wait()
        assert both.theirs.ended == ["the peer's credential has ended"] and len(both.theirs.got) == 2


async def test_a_client_whose_machine_has_slept_renews_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(monkeypatch, renews=True) as both:
        both.clock.now += 5 * CLIENT_S
        assert await both.read() == "hi"
        assert both.ends == both.clock() + CLIENT_S + CLOCK_SKEW_S


async def test_a_peer_that_is_shown_a_credential_of_more_than_the_cap_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair(monkeypatch, renews=False) as both:
        run_id = manifest_of(open_run=False).run_id
        greedy = client_link(AUTHORITY, run_id, both.client.peer_id, both.clock() + 2 * CLIENT_MAX_S)
        monkeypatch.setattr(both.gate, "_chain", (greedy,))
        with pytest.raises(RemoteError, match="lasts 4 hours and at most 2 hours are accepted"):
            await both.gate.introduce(both.member.peer_id, SOON)


async def test_an_open_client_renews_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.client.session.RENEW_S", 0.01)
    manifest = manifest_of(open_run=False)
    async with hosts(1, first=AUTHORITY) as (member,):
        Gate(member.rpc, manifest, AUTHORITY)
        serve_run_files(member.rpc, sign_manifest(AUTHORITY, manifest), b"")
        async with (
            open_node(member, NodeConfig(manifest.run_id), [MEMBERS]),
            open_client(invite_to(manifest, member.addresses)) as client,
        ):
            first = member.admissions.ends(client.host.peer_id)
            assert first <= time.time() + CLIENT_S + CLOCK_SKEW_S
            with trio.fail_after(SOON):
                while member.admissions.ends(client.host.peer_id) <= first:
                    await trio.sleep(0.01)
