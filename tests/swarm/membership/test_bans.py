"""Ban lists of a coordinator: saved, extended, sent to every member."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest
import trio

from cli.main import main
from peer.errors import CheckpointError, ConfigError, NotAdmitted, RemoteError
from peer.events import EventLog
from peer.files import write_atomically
from peer.identity import Identity
from swarm.membership.bans import extend_bans, spread_bans
from swarm.membership.member_record import MemberRecord
from swarm.run.credentials import admit, open_bans
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import save_run_files
from tests.swarm.run.test_gate import AUTHORITY, hear, hosts, manifest_of


def record(session: str) -> MemberRecord:
    return MemberRecord(
        session=session, name="x", role="full", version="0", addresses=[], term=0, round=0, head=b"", state_hash=b"",
        members=0, phase="", speed=0.0, loss=None, val_loss=None, tokens=0, bytes_up=0, bytes_down=0, joined_at=0.0,
        at=0.0,
    )  # fmt: skip


def test_bans_are_saved_and_only_grow(tmp_path: Path) -> None:
    manifest = manifest_of(open_run=True)
    path = Home(tmp_path).bans
    first, second = Identity.generate().peer_id, Identity.generate().peer_id
    assert extend_bans(path, AUTHORITY, manifest, []) is None
    one = extend_bans(path, AUTHORITY, manifest, [first])
    assert one is not None and extend_bans(path, AUTHORITY, manifest, []) == one
    two = extend_bans(path, AUTHORITY, manifest, [second])
    assert two is not None
    assert open_bans(two, manifest).peers == {first, second}
    assert open_bans(two, manifest).serial > open_bans(one, manifest).serial


def test_bad_bans_are_refused(tmp_path: Path) -> None:
    manifest = manifest_of(open_run=True)
    path = Home(tmp_path).bans
    with pytest.raises(ConfigError, match="no peer id"):
        extend_bans(path, AUTHORITY, manifest, ["nonsense"])
    with pytest.raises(ConfigError, match="itself"):
        extend_bans(path, AUTHORITY, manifest, [AUTHORITY.peer_id])
    path.write_bytes(b"\x00")
    with pytest.raises(CheckpointError, match="damaged"):
        extend_bans(path, AUTHORITY, manifest, [])


async def test_every_member_learns_the_bans_and_refuses_the_banned(tmp_path: Path) -> None:
    manifest = manifest_of(open_run=True)
    async with hosts(3, first=AUTHORITY) as (coordinator, member, banned):
        gate, at_member = Gate(coordinator.rpc, manifest, None), Gate(member.rpc, manifest, None)
        assert await hear(banned, member) == "hi"
        signed = extend_bans(Home(tmp_path).bans, AUTHORITY, manifest, [banned.peer_id])
        assert signed is not None
        gate.learn_bans(signed)
        view = {member.peer_id: record("one"), banned.peer_id: record("two"), AUTHORITY.peer_id: record("me")}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spread_bans, gate, lambda: view, AUTHORITY.peer_id, EventLog())
            with trio.fail_after(60):
                while at_member.bans is None:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        with pytest.raises(RemoteError, match="banned"):
            await hear(banned, member)


def test_an_invite_for_one_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, guest = Home(tmp_path / "c"), Identity.generate().peer_id
    authority = Identity.load_or_create(home.identity)
    manifest = msgspec.structs.replace(manifest_of(open_run=False), authority=authority.peer_id)
    save_run_files(home.path, sign_manifest(authority, manifest), b"")
    addresses = (f"/ip4/127.0.0.1/tcp/1/p2p/{authority.peer_id}",)
    write_atomically(home.invite, str(Invite(manifest.run_id, authority.peer_id, addresses)).encode())

    def invite_for(peer: str, folder: Path) -> int:
        arguments = ["peer", "coordinate", "--home", str(folder), "--invite-for", peer]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    assert invite_for(guest, home.path) == 0
    invite = Invite.parse(capsys.readouterr().out)
    admit(manifest, invite.token, guest, time.time())
    with pytest.raises(NotAdmitted, match="made out to"):
        admit(manifest, invite.token, Identity.generate().peer_id, time.time())
    assert invite_for("nonsense", home.path) == 2
    assert invite_for(guest, tmp_path / "empty") == 2
    assert "not a peer id" in (told := capsys.readouterr().err) and "holds no run yet" in told
