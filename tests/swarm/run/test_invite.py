"""The invite string, and an error for each way to damage it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError
from peer.identity import Identity, public_key_of
from swarm.run.credentials import sign_link
from swarm.run.invite import PREFIX, VERSION, Invite

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
CLOSED = Invite(RUN_ID, AUTHORITY.peer_id, ADDRESSES, CHAIN, KEY.key_pair.private_key.to_bytes())


def test_a_key_of_another_invite_is_refused() -> None:
    other = Identity.generate().key_pair.private_key.to_bytes()
    with pytest.raises(ConfigError, match="does not fit"):
        Invite.parse(str(msgspec.structs.replace(CLOSED, key=other)))


def test_round_trip_of_open_closed_and_personal_invites() -> None:
    for invite in (OPEN, CLOSED, msgspec.structs.replace(CLOSED, key=b"")):
        text = str(invite)
        assert text.isalnum() and text.islower() and len(text) < 1024
        assert Invite.parse(text) == invite


def test_line_wraps_and_capitals_are_accepted() -> None:
    text = str(OPEN)
    wrapped = "  \n".join(text[i : i + 70] for i in range(0, len(text), 70)).upper()
    assert Invite.parse(f"\t{wrapped}\n") == OPEN


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no invite"),
        ("hello", "no invite"),
        (PREFIX + "9" + str(OPEN)[len(PREFIX) + 1 :], "ask for a new invite"),
        (PREFIX + VERSION, "damaged"),
        (str(OPEN)[:-9], "cut off|damaged"),
        (str(OPEN) + "a" * 8, "damaged"),
        (PREFIX + VERSION + "0189" * 10, "characters that no invite has"),
        (PREFIX + VERSION + "a" * 10_000, "longer than any invite"),
    ],
)
def test_a_damaged_invite_has_a_remedy(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Invite.parse(text)


@given(st.integers(len(PREFIX), len(str(OPEN)) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
@settings(max_examples=200, deadline=None)
def test_one_wrong_letter_never_passes(position: int, letter: str) -> None:
    text = str(OPEN)
    if text[position] != letter:
        with pytest.raises(ConfigError):
            Invite.parse(text[:position] + letter + text[position + 1 :])


@settings(deadline=None)
@given(st.text())
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Invite.parse(PREFIX + VERSION + text)


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
