"""The places of an invite at one member's gate: who takes one, and who needs none."""

from __future__ import annotations

import pytest

from peer.errors import NotAdmitted, RemoteError
from peer.identity import public_key_of
from swarm.run.ban_list import BanList, sign_bans
from swarm.run.credentials import Chain
from swarm.run.gate import ENTER, Entry, Gate
from swarm.run.manifest import PROTOCOL_VERSION
from swarm.run.sections import RunRules
from tests.swarm.run.test_gate import AUTHORITY, SOON, gate_of, hear, hosts, invite_to, manifest_of
from tests.swarm.run.test_served_model import served_model


async def test_only_who_proves_itself_takes_a_place() -> None:
    """What one guest's keys begin and sign burns no place of its invite, and no more records are believed than it has
    places."""
    manifest = manifest_of(open_run=False)
    invite = invite_to(manifest, guests=2)
    async with hosts(4) as (member, *keys, honest):
        gate, nonce = gate_of(member, manifest), bytes(32)
        for host in keys:
            chain = invite.membership(host.identity)
            await host.rpc.call(member.peer_id, ENTER, _entry(gate, nonce, chain), timeout_s=SOON)
            gate.vouch(host.peer_id, chain)
        third = invite.membership(honest.identity)
        with pytest.raises(NotAdmitted, match="brought in 2 peers"):
            gate.vouch(honest.peer_id, third)
        Gate(honest.rpc, manifest, honest.identity, third)
        assert await hear(honest, member) == "hi"
        gate.vouch(honest.peer_id, third)
        assert gate.guests.guests(invite.chain[-1].key) == {public_key_of(honest.peer_id)}


async def test_what_is_decided_of_a_guest_is_decided_for_all() -> None:
    """The invite has no place left at this member: a peer that is in a head, or that the authority names, comes in."""
    manifest = manifest_of(open_run=False, run=RunRules(name="gated", open=False, members_per_prefix=1))
    invite = invite_to(manifest)
    async with hosts(4) as (member, first, in_head, named):
        gate = gate_of(member, manifest)
        for host in (first, in_head, named):
            Gate(host.rpc, manifest, host.identity, invite.membership(host.identity))
        assert await hear(first, member) == "hi"
        for host in (in_head, named):
            with pytest.raises(RemoteError, match=r"1 peers of the address prefix 127\.0\.0\.0/24"):
                await hear(host, member)
        member.admissions.trust("head", [in_head.peer_id])
        stays = {invite.chain[-1].key: frozenset({public_key_of(named.peer_id)})}
        gate.learn_bans(sign_bans(AUTHORITY, BanList(manifest.run_id, 1, withdrawn=stays)))
        assert await hear(named, member) == "hi"
        with pytest.raises(RemoteError, match="withdrawn"):
            await hear(in_head, member)
    async with hosts(3) as (member, first, in_head):
        gate_of(member, manifest).guests.per_prefix = 1
        for host in (first, in_head):
            Gate(host.rpc, manifest, host.identity, invite.membership(host.identity))
        assert await hear(first, member) == "hi"
        member.admissions.trust("head", [in_head.peer_id])
        assert await hear(in_head, member) == "hi"


def _entry(gate: Gate, nonce: bytes, chain: Chain) -> Entry:
    return Entry(PROTOCOL_VERSION, gate._run_hash(nonce), nonce, chain, 0)


async def test_an_invite_to_a_served_model_brings_as_many_from_one_place_as_it_says() -> None:
    """There is no rule for it that an author could raise: with its number of guests all is said."""
    manifest = served_model(authority=AUTHORITY.peer_id)
    invite = invite_to(manifest, guests=10)
    async with hosts(10) as (member, *servers):
        gate_of(member, manifest)
        for host in servers:
            Gate(host.rpc, manifest, host.identity, invite.membership(host.identity))
            assert await hear(host, member) == "hi"
