"""The greeting of two peers that have just connected: each sends its addresses for dialling."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.net.address_book import ADDRESS_CHARS_MAX
from peer.net.method import Method


class Addresses(msgspec.Struct, frozen=True):
    """The addresses of a peer, exchanged on every new connection."""

    addresses: Annotated[list[Annotated[str, msgspec.Meta(max_length=ADDRESS_CHARS_MAX)]], msgspec.Meta(max_length=64)]


HELLO: Final = Method("net/hello", Addresses, Addresses, access="open", urgent=True)
