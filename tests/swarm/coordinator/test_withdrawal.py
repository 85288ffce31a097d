"""What `peer coordinate` takes back: invites, and what came by a banned peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from peer.errors import ConfigError, NotAdmitted
from peer.files import write_atomically
from peer.identity import Identity, public_key_of
from swarm.coordinator.withdrawal import named_bans, withdraw_printed
from swarm.membership.member_record import MemberRecord
from swarm.membership.membership import Membership
from swarm.run.agreement import sponsor_name
from swarm.run.gate import ENTER, Entry, Gate
from swarm.run.home import Home
from swarm.run.peer_context import Place
from tests.swarm.membership.test_bans import record
from tests.swarm.run.test_gate import AUTHORITY, hosts, invite_to, manifest_of


@dataclass
class View:
    """Stands for a membership that has been read."""

    view: Mapping[str, MemberRecord] = field(default_factory=dict)


async def test_a_new_invite_keeps_who_takes_part_and_no_key_that_only_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TTL_S", "REFRESH_S"):
        monkeypatch.setattr(f"swarm.coordinator.withdrawal.{name}", 0.01)
    manifest, home = manifest_of(open_run=False), Home(tmp_path)
    invite = invite_to(manifest)
    write_atomically(home.invite, str(invite).encode())
    async with hosts(4, first=AUTHORITY) as (coordinator, guest, silent, unproved):
        gate = Gate(coordinator.rpc, manifest, AUTHORITY)
        chains = {host: invite.membership(host.identity) for host in (guest, silent, unproved)}
        for host in (guest, silent):
            await Gate(host.rpc, manifest, host.identity, chains[host]).introduce(AUTHORITY.peer_id, 60.0)
        began = Entry(manifest.protocol, gate._run_hash(bytes(32)), bytes(32), chains[unproved], 0)
        await unproved.rpc.call(AUTHORITY.peer_id, ENTER, began, timeout_s=60.0)
        seen = msgspec.structs.replace(record("one"), credential=chains[guest])
        membership = cast(Membership[Any], View({guest.peer_id: seen}))
        told = list[dict[str, Any]]()
        coordinator.events.subscribe(lambda event: told.append(event.fields))
        await withdraw_printed(Place(coordinator, home, manifest), gate, membership, [], ())
        told = [fields for fields in told if "kept" in fields]
        assert told == [{"kept": [f"x {guest.peer_id[-6:]}"], "dropped": 1}]
        gate.vouch(guest.peer_id, chains[guest])
        for host in (silent, unproved):
            with pytest.raises(NotAdmitted, match="withdrawn"):
                gate.vouch(host.peer_id, chains[host])
        await withdraw_printed(Place(coordinator, home, manifest), gate, membership, [], (silent.peer_id,))
        gate.vouch(silent.peer_id, chains[silent])


def test_a_ban_names_a_peer_or_an_invite() -> None:
    key, peer, friend = bytes(32), Identity.generate().peer_id, Identity.generate().peer_id
    name, stay = sponsor_name(key), frozenset({public_key_of(friend)})
    found = named_bans([peer, name[:8].upper()], [], [key, bytes(range(32))])
    assert (found.peers, found.withdrawn) == ({peer}, {key: frozenset()})
    found = named_bans([peer, name], [friend], [key])
    assert found.withdrawn == {key: stay, public_key_of(peer): stay}
    for word in ("nonsense", name[:7], "0" * 8):
        with pytest.raises(ConfigError, match="no peer id, and no invite"):
            named_bans([word], [], [key])
    with pytest.raises(ConfigError, match="--keep"):
        named_bans([], ["nonsense"], [])
