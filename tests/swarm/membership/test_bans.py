"""Ban lists of a coordinator: saved, extended, sent to every member."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from peer.errors import CheckpointError, ConfigError, RemoteError
from peer.events import EventLog
from peer.identity import Identity
from swarm.membership import bans
from swarm.membership.bans import extend_bans, spread_bans
from swarm.membership.member_record import MemberRecord
from swarm.run.ban_list import open_bans
from swarm.run.gate import Gate
from swarm.run.home import Home
from tests.swarm.run.test_gate import AUTHORITY, gate_of, hear, hosts, manifest_of


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


async def test_every_member_learns_the_bans_and_refuses_the_banned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a list that was extended after a member had been told of it, as a withdrawal does."""
    monkeypatch.setattr(bans, "SPREAD_EVERY_S", 0.05)
    manifest, later = manifest_of(open_run=True), Identity.generate().peer_id
    async with hosts(3, first=AUTHORITY) as (coordinator, member, banned):
        gate, at_member = Gate(coordinator.rpc, manifest, AUTHORITY), gate_of(member, manifest)
        gate_of(banned, manifest)
        assert await hear(banned, member) == "hi"
        signed = extend_bans(Home(tmp_path).bans, AUTHORITY, manifest, [banned.peer_id])
        assert signed is not None
        gate.learn_bans(signed)
        view = {member.peer_id: record("one"), banned.peer_id: record("two"), AUTHORITY.peer_id: record("me")}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spread_bans, gate, lambda: view, AUTHORITY.peer_id, EventLog())
            with trio.fail_after(300):
                while at_member.bans is None:
                    await trio.sleep(0.01)
                longer = extend_bans(Home(tmp_path).bans, AUTHORITY, manifest, [later])
                assert longer is not None
                gate.learn_bans(longer)
                while later not in at_member.bans.peers:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        with pytest.raises(RemoteError, match="banned"):
            await hear(banned, member)
