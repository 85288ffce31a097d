"""Which members an invite names beside the peer that prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from peer.identity import Identity
from peer.net.address_book import AddressBook
from swarm.membership.living import NAMED_MAX, is_answered, living
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.inviting import known_addresses, with_living
from swarm.run.manifest import RUN_ID_BYTES, run_id_text

OWN = ("/ip4/198.18.0.1/tcp/31337/p2p/own",)
PUBLIC, LAN, LOOPBACK = "/ip4/8.8.8.8/tcp/1", "/ip4/192.168.0.2/tcp/1", "/ip4/127.0.0.1/tcp/1"
PEERS = sorted(Identity.generate().peer_id for _ in range(4))
RELAYED = f"/ip4/8.8.4.4/tcp/4001/p2p/{PEERS[0]}/p2p-circuit"


@dataclass
class Record:
    addresses: Sequence[str]
    name: str = "ann"
    role: str = "full"


@dataclass
class Network:
    """Answers at all addresses but `silent`."""

    silent: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    async def answers(self, address: str) -> bool:
        self.asked.append(address)
        return not address.startswith(self.silent) if self.silent else True


async def named(
    records: dict[str, list[str]], own: Sequence[str] = OWN, before: Sequence[str] = (), silent: tuple[str, ...] = ()
) -> tuple[str, ...]:
    return await living({p: Record(a) for p, a in records.items()}, own, before, Network(silent).answers)


async def test_members_that_answer_directly_are_named() -> None:
    a, b, c, d = PEERS
    full = {p: f"{PUBLIC}{n}/p2p/{p}" for n, p in enumerate(PEERS)}
    records = {p: [f"{PUBLIC}{n}"] for n, p in enumerate(PEERS)}
    assert await named(records) == (full[a], full[b]) and NAMED_MAX == 2
    assert await named(records, silent=(f"{PUBLIC}0",)) == (full[b], full[c])
    assert await named(records, before=(full[d], full[c])) == (full[c], full[d]), "those that were named stay"
    assert await named({a: [LAN, PUBLIC]}, silent=(LAN,)) == (f"{PUBLIC}/p2p/{a}",)
    assert await named({}) == ()


async def test_a_relayed_member_is_named_only_if_there_is_no_other() -> None:
    a, b, *_ = PEERS
    assert await named({a: [RELAYED], b: [PUBLIC]}) == (f"{PUBLIC}/p2p/{b}",)
    assert await named({a: [RELAYED], b: [PUBLIC]}, silent=(PUBLIC,)) == (f"{RELAYED}/p2p/{a}",)


async def test_a_member_is_reached_as_far_as_the_one_that_names_it() -> None:
    a, *_ = PEERS
    world = ("/ip4/1.1.1.1/tcp/1/p2p/own",)
    assert await named({a: [LAN]}, world) == () and await named({a: [LOOPBACK]}, OWN) == ()
    assert await named({a: [LAN]}, OWN) == (f"{LAN}/p2p/{a}",)
    assert await named({a: [LOOPBACK]}, ("/ip4/127.0.0.1/tcp/9/p2p/own",)) == (f"{LOOPBACK}/p2p/{a}",)


async def test_what_listens_answers() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEERS[0]}"
    assert await is_answered(address)
    await listeners[0].aclose()
    assert not await is_answered(address)


def test_the_names_go_into_invites(tmp_path: Path) -> None:
    home, (own, a, b, c) = Home(tmp_path), PEERS
    first = f"{PUBLIC}/p2p/{own}"
    plain = Invite(run_id_text(bytes(RUN_ID_BYTES)), own, (first,))
    home.invite.write_text(str(plain))
    home.note_listening([first])
    book = AddressBook()
    for peer, address in ((a, f"{PUBLIC}1"), (b, RELAYED), (c, f"{PUBLIC}3")):
        book.add(peer, [address])
    book.save(home.addresses)
    assert known_addresses(home) == (first, f"{PUBLIC}3/p2p/{c}", f"{PUBLIC}1/p2p/{a}"), "who was met last comes first"
    assert with_living(home, (first,)) == (first,)
    lives = f"{PUBLIC}2/p2p/{b}"
    home.note_living([lives])
    assert known_addresses(home) == with_living(home, (first,)) == (first, lives)
    assert len(with_living(home, [f"{PUBLIC}{n}/p2p/{own}" for n in range(16)])) == 16
    longer = len(str(Invite(plain.run_id, own, (first, lives)))) - len(str(plain))
    assert longer <= 90, "letters that each name costs"
