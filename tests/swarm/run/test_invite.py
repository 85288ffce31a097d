"""The invite string, and an error for each way to damage it."""

from __future__ import annotations

import random
from string import ascii_letters, digits
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from multiaddr import Multiaddr

from peer.base58 import from_base58, to_base58
from peer.errors import ConfigError
from peer.identity import Identity, peer_id_of, public_key_of
from swarm.run.credentials import CHAIN_MAX, GUESTS_MAX, member_link, sign_link
from swarm.run.invite import PREFIX, VERSION, Invite
from swarm.run.manifest import run_id_text

AUTHORITY = Identity.generate()
RUN_ID = "abcdefgh234567abcdefgh234567abcd"
ADDRESSES = (
    f"/ip4/192.0.2.7/tcp/31337/p2p/{AUTHORITY.peer_id}",
    f"/dns4/relay.example.org/tcp/4001/p2p/{Identity.generate().peer_id}/p2p-circuit/p2p/{AUTHORITY.peer_id}",
    f"/ip6/2001:db8::1/tcp/31337/p2p/{AUTHORITY.peer_id}",
)
OPEN = Invite(RUN_ID, AUTHORITY.peer_id, ADDRESSES)


KEY = Identity.generate()
CHAIN = (sign_link(AUTHORITY, RUN_ID, "invite", public_key_of(KEY.peer_id), guests=4, expires=1060.0),)
RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
P2P = bytes.fromhex("a50326002408011220")  # /p2p/ of an Ed25519 key, but for the key
CLOSED = Invite(RUN_ID, AUTHORITY.peer_id, ADDRESSES, CHAIN, KEY.seed)


def sealed(payload: bytes) -> str:
    """Return the text of a content, right or wrong."""
    return PREFIX + VERSION + to_base58(payload + blake3(b"barnraise invite 3" + payload).digest(4))


def opened(text: str) -> bytes:
    """Return the content of an invite."""
    return from_base58(text.removeprefix(PREFIX + VERSION))[:-4]


def test_a_key_of_another_invite_is_refused() -> None:
    other = Identity.generate().seed
    with pytest.raises(ConfigError, match="does not fit"):
        Invite.parse(str(msgspec.structs.replace(CLOSED, key=other)))


def test_round_trip_of_open_closed_and_personal_invites() -> None:
    for invite in (OPEN, CLOSED, msgspec.structs.replace(CLOSED, key=b"")):
        text = str(invite)
        assert text.isalnum() and text.isascii() and len(text) < 512
        assert Invite.parse(text) == invite


def test_line_wraps_and_a_capital_at_the_start_are_accepted() -> None:
    text = str(OPEN).capitalize()[: len(PREFIX)] + str(OPEN)[len(PREFIX) :]
    assert text.startswith("Barnraise")
    wrapped = "  \n".join(text[i : i + 70] for i in range(0, len(text), 70))
    assert Invite.parse(f"\t{wrapped}\n") == OPEN


def test_an_invite_is_as_short_as_its_content_allows() -> None:
    """A run, keys that are named once, 8 to 10 bytes an address, 64 a signature, the private key, the checksum."""
    direct, member, seed = ADDRESSES[:1], Identity.generate(), CLOSED.key
    living = (*direct, *(f"/ip4/192.0.2.{n}/tcp/4001/p2p/{Identity.generate().peer_id}" for n in (8, 9)))
    link = sign_link(AUTHORITY, RUN_ID, "invite", public_key_of(KEY.peer_id), guests=8, expires=2e9)
    chain = (link, member_link(KEY, RUN_ID, member.peer_id, (link,), 2e9))
    texts = [
        str(Invite(RUN_ID, AUTHORITY.peer_id, addresses, links, key))
        for addresses, links, key in (
            (direct, (), b""),
            (direct, (link,), seed),
            (living, (link,), seed),
            (direct, chain, b""),
        )
    ]
    assert [len(text) for text in texts] == [103, 243, 357, 385]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no invite"),
        ("hello", "no invite"),
        (PREFIX + "9" + str(OPEN)[len(PREFIX) + 1 :], "ask for a new invite"),
        (PREFIX + VERSION, "damaged"),
        (str(OPEN)[:-9], "cut off|damaged"),
        (str(OPEN) + "a" * 8, "cut off|damaged"),
        (PREFIX + VERSION + "0OIl" * 10, "characters that no invite has"),
        (PREFIX + VERSION + "é" * 40, "characters that no invite has"),
        (PREFIX + "2" + str(OPEN)[len(PREFIX) + 1 :], "ask for a new invite"),
        (PREFIX + VERSION + "a" * 10_000, "longer than any invite"),
    ],
)
def test_a_damaged_invite_has_a_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Invite.parse(text)


@given(st.integers(len(PREFIX), len(str(OPEN)) - 1), st.sampled_from(ascii_letters + digits))
@settings(max_examples=200, deadline=None)
def test_one_wrong_letter_never_passes(position: int, letter: str) -> None:
    text = str(OPEN)
    if text[position] != letter and (position > len(PREFIX) or text[position] != letter.lower()):
        with pytest.raises(ConfigError):
            Invite.parse(text[:position] + letter + text[position + 1 :])


@settings(deadline=None)
@given(st.text())
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Invite.parse(PREFIX + VERSION + text)


PEERS = [Identity(bytes([number]) * 32) for number in range(1, 6)]


@st.composite
def invites(draw: Any) -> Invite:
    """Return an invite that the code could print, with a chain signed by its keys."""
    run_id, peers = run_id_text(draw(st.binary(min_size=20, max_size=20))), st.sampled_from(PEERS)
    host = st.one_of(
        st.ip_addresses(v=4).map("/ip4/{}".format),
        st.ip_addresses(v=6).map("/ip6/{}".format),
        st.from_regex(r"[a-z]{1,30}(\.[a-z]{1,30}){1,4}", fullmatch=True).map("/dns4/{}".format),
    )
    hop = st.builds(
        "{}/{}/{}/p2p/{}".format, host, st.sampled_from(["tcp", "udp"]), st.integers(0, 65535), st.just("{}")
    )
    way = st.sampled_from(["", f"/p2p-circuit/p2p/{RSA}", "/p2p-circuit/p2p/{}"])
    address = st.builds(
        lambda to, on, *ids: (to + on).format(*(each.peer_id for each in ids)), hop, way, peers, peers
    ).filter(lambda text: not text.endswith(RSA))
    address = address.map(lambda text: str(Multiaddr(text)))  # some IPv6 addresses have two texts
    addresses = tuple(draw(st.lists(address, min_size=1, max_size=4)))
    chain, signer, key = list[Any](), PEERS[0], b""
    for number in range(draw(st.integers(0, CHAIN_MAX))):
        holder, guests, expires = draw(peers), draw(st.integers(0, GUESTS_MAX)), draw(st.integers(0, (1 << 40) - 1))
        kind = ("invite", "member")[number % 2]
        chain.append(
            sign_link(signer, run_id, kind, public_key_of(holder.peer_id), guests=guests, expires=expires)  # type: ignore[arg-type]
        )
        signer, key = holder, holder.seed
    return Invite(run_id, PEERS[0].peer_id, addresses, tuple(chain), key if draw(st.booleans()) else b"")


@settings(deadline=None, max_examples=20)
@given(invites(), st.integers(0, 10**6), st.binary(min_size=1, max_size=40))
def test_every_invite_comes_back_and_has_one_text(invite: Invite, chance: int, more: bytes) -> None:
    text = str(invite)
    assert Invite.parse(text) == invite
    payload = opened(text)
    assert sealed(payload) == text
    for wrong in (payload[: chance % len(payload)], payload + more):
        with pytest.raises(ConfigError, match=r"malformed|does not fit"):
            Invite.parse(sealed(wrong))


def test_every_shorter_content_and_every_shorter_text_is_refused() -> None:
    for invite in (OPEN, CLOSED):
        text, payload = str(invite), opened(str(invite))
        for end in range(len(payload)):
            with pytest.raises(ConfigError, match="malformed"):
                Invite.parse(sealed(payload[:end]))
        for end in range(len(text)):
            with pytest.raises(ConfigError):
                Invite.parse(text[:end])


def test_what_is_parsed_from_any_content_has_that_content() -> None:
    """Bits are turned, bytes taken out under a right checksum: what is taken is an invite's only text."""
    chance, taken = random.Random(38), 0
    for _ in range(400):
        content = bytearray(opened(str(chance.choice((OPEN, CLOSED)))))
        for _ in range(chance.randint(1, 3)):
            at, way = chance.randrange(len(content)), chance.randrange(3)
            content[at : at + (way != 0)] = b"" if way == 1 else bytes([chance.randrange(256)])
        text = sealed(bytes(content))
        try:
            invite = Invite.parse(text)
        except ConfigError:
            continue
        taken += 1
        assert str(invite) == text
    assert taken  # what is not signed may be another, such as a byte of a port


def content_of(*, counts: int = 0, run_id: bytes = bytes(20), rest: bytes = b"") -> str:
    return sealed(bytes([counts]) + run_id + rest)


KEY_1, KEY_2 = (public_key_of(peer.peer_id) for peer in PEERS[:2])
IP4 = bytes.fromhex("04c0000207060050")  # /ip4/192.0.2.7/tcp/80
HERE = bytes([len(IP4) << 2 | 3]) + IP4 + b"\0"  # and the peer of the first key


def part(raw: bytes, has_key: bool, is_last: bool) -> bytes:
    number = len(raw) << 2 | has_key << 1 | is_last
    return (bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])) + raw


def test_the_content_is_as_documented() -> None:
    invite = Invite.parse(content_of(rest=b"\0" + KEY_1 + HERE))
    assert invite == Invite("a" * 32, peer_id_of(KEY_1), (f"/ip4/192.0.2.7/tcp/80/p2p/{peer_id_of(KEY_1)}",))


@pytest.mark.parametrize(
    ("counts", "rest", "words"),
    [
        (0, b"\1" + KEY_1 + HERE, "a number above 0"),  # a key before the first
        (0, b"\0" + KEY_1 + part(IP4, True, True) + b"\2" + KEY_2, "a number above 1"),
        (0, b"\x80\0" + KEY_1 + HERE, "another form"),  # a number with a byte too many
        (0, b"\0" + KEY_1 + b"\xff" * 9 + b"\1" + HERE, "ends too early|a number above"),
        (0, b"\0" + KEY_1 + part(IP4, True, True) + b"\1" + KEY_1, "another form"),  # the same key twice
        (0, b"\0" + KEY_1 + part(IP4 + P2P + KEY_1, False, True), "another form"),  # a key that is not named
        (0, b"\0" + KEY_1 + part(IP4, False, False) + part(b"", True, True) + b"\0", "another form"),
        (0, b"\0" + KEY_1 + part(IP4, True, False) + b"\0" + part(b"", False, True), "another form"),
        (0, b"\0" + KEY_1 + part(b"a" * 512, True, True) + b"\0", "more than 512"),
        (0, b"\0" + KEY_1 + part(b"", True, False) + b"\0" + 12 * (part(b"", True, False) + b"\0"), "more than 512"),
        (0, b"\0" + KEY_1 + HERE + b"\0", "another form"),
        (1 << 4, b"\0" + KEY_1 + HERE + bytes(32), "does not fit"),  # a private key without a link
        (6 << 5, b"\0" + KEY_1 + HERE, "at most 5"),
        (1 << 5, b"\0" + KEY_1 + HERE + b"\3" + b"\0\0" + bytes(64), "no link is of this kind"),
        (1 << 5, b"\0" + KEY_1 + HERE + b"\x84\x20" + b"\0\0" + bytes(64), "a number above|number of guests"),
        (1 << 5, b"\0" + KEY_1 + HERE + b"\0" + b"\x80" * 5 + b"\x20\0" + bytes(64), "a number above"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_content_of_another_form_is_refused(counts: int, rest: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Invite.parse(content_of(counts=counts, rest=rest))


def test_a_chain_whose_signatures_are_wrong_is_refused_with_its_key() -> None:
    payload = bytearray(opened(str(CLOSED)))
    payload[-33] ^= 1  # of the signature, which ends before the private key
    with pytest.raises(ConfigError, match="does not fit"):
        Invite.parse(sealed(bytes(payload)))


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ((), "give it 1 to 16"),
        (ADDRESSES * 6, "give it 1 to 16"),
        (("/ip4/192.0.2.7/tcp/31337",), "names no peer"),
    ],
)
def test_the_addresses_of_an_invite_are_checked(addresses: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Invite.parse(str(Invite(RUN_ID, AUTHORITY.peer_id, addresses)))
