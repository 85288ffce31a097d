"""A peer whose invite leads nowhere any more finds a member on its own network, and the run through it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.lan.discovery import Lan
from peer.net.reach import LOCAL
from swarm.membership.member_record import MEMBERS
from swarm.membership.open_peer import open_peer
from swarm.run.bootstrap import EnteredRun, enter_run
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest, open_manifest, sign_manifest
from swarm.run.manifest_transfer import save_run_files
from tests.swarm.run.test_gate import AUTHORITY, invite_to, manifest_of


def peer_of(identity: Identity, invite: Invite) -> AbstractAsyncContextManager[Host]:
    return open_host(identity=identity, events=EventLog(), reach=replace(LOCAL, bootstrap=invite.addresses))


@pytest.mark.parametrize("is_known", [False, True], ids=["newcomer", "member"])
async def test_a_stale_invite_is_enough_on_a_members_network(tmp_path: Path, is_known: bool) -> None:
    manifest = manifest_of(open_run=False)
    signed = sign_manifest(AUTHORITY, manifest)
    stale = invite_to(manifest)  # at a port where nothing listens
    lans = [Lan(manifest.run_id), Lan(manifest.run_id)]
    identity, home = Identity.generate(), Home(tmp_path / "home")
    chain = stale.membership(identity)

    async def found(host: Host) -> EnteredRun[Manifest]:
        return EnteredRun(signed, manifest, b"", Gate(host.rpc, manifest, AUTHORITY))

    async def enter(host: Host) -> EnteredRun[Manifest]:
        return await enter_run(host, stale, home, chain, open_manifest, found=lans[1].found)

    first, second = peer_of(AUTHORITY, stale), peer_of(identity, stale)
    if is_known:
        save_run_files(home.path, signed, b"")
    with trio.fail_after(300):
        async with (
            open_peer(first, Home(tmp_path / "authority"), found, lambda gate: [MEMBERS], lans[0]) as authority,
            open_peer(second, home, enter, lambda gate: [MEMBERS], lans[1]) as joined,
        ):
            assert joined.run.signed == signed
            while not (authority.node.peers and joined.node.peers):
                await trio.sleep(0.05)
            assert authority.node.peers == {identity.peer_id} and joined.node.peers == {AUTHORITY.peer_id}
