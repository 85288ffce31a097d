"""Invites of coordinators and of members: `peer invite`, and what the coordinator prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from cli.main import main
from peer.errors import ConfigError, NotAdmitted
from peer.files import write_atomically
from peer.identity import Identity
from swarm.membership.bans import extend_bans
from swarm.run.ban_list import BanList, open_bans
from swarm.run.credentials import Chain, judge
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.inviting import known_addresses, make_invite, printed_invite, saved_invite_keys
from swarm.run.manifest import Manifest, sign_manifest
from swarm.run.manifest_transfer import save_run_files
from tests.swarm.run.test_gate import manifest_of


@dataclass(frozen=True)
class Run:
    """A closed run, and the home of its coordinator."""

    home: Home
    authority: Identity
    manifest: Manifest
    invite: Invite

    def access(self, chain: Chain, peer: Identity, bans: BanList | None = None) -> str:
        return judge(self.manifest, chain, peer.peer_id, time.time(), bans).access

    def member(self, folder: Path, invite: Invite) -> tuple[Home, Identity]:
        """The home of a member that came by `invite`."""
        home = Home(folder)
        save_run_files(home.path, sign_manifest(self.authority, self.manifest), b"")
        identity = Identity.load_or_create(home.identity)
        write_atomically(home.invite, f"{invite}\n".encode())
        write_atomically(home.listening, f"/ip4/192.0.2.9/tcp/7/p2p/{identity.peer_id}\n".encode())
        return home, identity


@pytest.fixture
def run(tmp_path: Path) -> Run:
    home = Home(tmp_path / "coordinator")
    authority = Identity.load_or_create(home.identity)
    manifest = msgspec.structs.replace(manifest_of(open_run=False), authority=authority.peer_id)
    save_run_files(home.path, sign_manifest(authority, manifest), b"")
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{authority.peer_id}"
    invite = printed_invite(home, authority, manifest, (address,), None)
    write_atomically(home.invite, f"{invite}\n".encode())
    write_atomically(home.listening, f"{address}\n".encode())
    return Run(home, authority, manifest, invite)


Asks = Callable[..., str]


@pytest.fixture
def peer_invite(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asks:
    """Returns what `peer invite` prints, or its error."""

    def call(home: Home, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["peer", "invite", "--home", str(home.path), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return told.out if ended.value.code == 0 else told.err

    return call


def test_a_coordinator_prints_one_invite_however_often_it_starts(run: Run) -> None:
    again = printed_invite(run.home, run.authority, run.manifest, ("/ip4/127.0.0.1/tcp/2/p2p/x",), None)
    assert (again.key, again.chain) == (run.invite.key, run.invite.chain)
    assert again.addresses != run.invite.addresses
    bans = extend_bans(
        run.home.bans, run.authority, run.manifest, [], dict.fromkeys(saved_invite_keys(run.home), frozenset())
    )
    assert bans is not None
    other = printed_invite(run.home, run.authority, run.manifest, (), open_bans(bans, run.manifest))
    assert other.key != run.invite.key
    guest = Identity.generate()
    with pytest.raises(NotAdmitted, match="withdrawn"):
        run.access(run.invite.membership(guest), guest, open_bans(bans, run.manifest))
    assert run.access(other.membership(guest), guest, open_bans(bans, run.manifest)) == "member"


def test_any_member_invites_while_the_coordinator_is_away(run: Run, tmp_path: Path, peer_invite: Asks) -> None:
    home, identity = run.member(tmp_path / "member", run.invite)
    invite = Invite.parse(peer_invite(home, "--guests", "2", "--days", "3"))
    assert invite.addresses == (f"/ip4/192.0.2.9/tcp/7/p2p/{identity.peer_id}", *run.invite.addresses)
    assert known_addresses(home) == invite.addresses
    friend = Identity.generate()
    assert run.access(invite.membership(friend), friend) == "member"
    assert invite.chain[-1].guests == 2 and invite.chain[-1].expires <= time.time() + 3 * 86400
    far, far_identity = run.member(tmp_path / "far", invite)
    told = peer_invite(far)
    assert "without the right to invite" in told and far_identity.peer_id not in told


def test_an_invite_for_one_peer(run: Run, tmp_path: Path, peer_invite: Asks) -> None:
    guest, other = Identity.generate(), Identity.generate()
    invite = Invite.parse(peer_invite(run.home, "--for", guest.peer_id))
    assert not invite.key and run.access(invite.membership(guest), guest) == "member"
    with pytest.raises(NotAdmitted, match="made out to"):
        run.access(invite.membership(other), other)
    client = Identity.generate()
    with pytest.raises(ConfigError, match="give the --home"):
        invite.client_chain(client.peer_id, None, time.time())
    assert run.access(invite.client_chain(client.peer_id, guest, time.time()), client) == "client"
    with pytest.raises(ConfigError, match="without the right"):
        make_invite(guest, invite.chain, run.manifest, (), guests=1, days=1)


def test_bad_requests_have_one_sentence(run: Run, tmp_path: Path, peer_invite: Asks) -> None:
    home, identity = run.member(tmp_path / "member", run.invite)
    assert "is not a peer id" in peer_invite(run.home, "--for", "nonsense")
    assert "holds no run yet" in peer_invite(Home(tmp_path / "empty"))
    assert "not the coordinator's home" in peer_invite(home, "--for", identity.peer_id)


def test_the_owner_of_a_run_looks_without_an_invite(run: Run) -> None:
    client = Identity.generate()
    bare = msgspec.structs.replace(run.invite, chain=(), key=b"")
    assert run.access(bare.client_chain(client.peer_id, run.authority, time.time()), client) == "client"
