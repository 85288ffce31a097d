"""What a guest says of its own address: no third party is dialled for it again and again."""

from __future__ import annotations

import pytest
import trio

from optim.config import GossipConfig
from peer.errors import DialError
from peer.net.hello import HELLO, Addresses
from swarm.run.manifest import AnyManifest
from swarm.run.sections import RunRules
from tests.swarm.run.test_gate import AUTHORITY, SOON, gate_of, hear, hosts, manifest_of
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.run.test_served_model import served_model


async def _count(listener: trio.socket.SocketType, dials: list[float]) -> None:
    while True:
        stream, _ = await listener.accept()
        dials.append(trio.current_time())
        stream.close()


async def test_guests_that_claim_one_address_have_it_dialled_once() -> None:
    """As the members of a closed run did for eight keys of one invite. Of a member of the head it is believed."""
    manifest, dials = manifest_of(open_run=False), list[float]()
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        elsewhere = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        async with hosts(5) as (member, *guests), trio.open_nursery() as nursery:
            nursery.start_soon(_count, listener, dials)
            gate_of(member, manifest)
            for guest in guests:
                gate_of(guest, manifest)
                assert await hear(guest, member) == "hi"
                member.book.forget(guest.peer_id)
                await guest.rpc.call(member.peer_id, HELLO, Addresses([elsewhere]), timeout_s=SOON)
                assert member.book.get(guest.peer_id) == (elsewhere,) and not member.book.vouched(guest.peer_id)
                await member.disconnect(guest.peer_id)
            for guest in guests * 3:
                with pytest.raises(DialError):
                    await member.connect(guest.peer_id, timeout_s=SOON)
            assert len(dials) == 1
            member.admissions.trust("head", [guests[0].peer_id])
            await guests[0].rpc.call(member.peer_id, HELLO, Addresses([elsewhere]), timeout_s=SOON)
            assert elsewhere in member.book.vouched(guests[0].peer_id)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "manifest",
    [
        served_model(authority=AUTHORITY.peer_id),
        make_manifest(AUTHORITY.peer_id, outer=GossipConfig(steps=10), run=RunRules(name="gossip", open=False)),
    ],
    ids=["served model", "gossip"],
)
async def test_where_there_are_no_heads_a_members_word_about_itself_is_passed_on(manifest: AnyManifest) -> None:
    """Else nothing would ever say more of it."""
    async with hosts(2) as (founder, server):
        for host in (founder, server):
            gate_of(host, manifest)
        assert await hear(server, founder) == "hi"
        founder.book.forget(server.peer_id)
        await server.rpc.call(founder.peer_id, HELLO, Addresses(list(server.addresses)), timeout_s=SOON)
        assert founder.book.vouched(server.peer_id)
