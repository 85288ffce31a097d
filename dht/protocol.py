"""The four calls between nodes. Clients may look, members store.

    dht/find    names the peers nearest to a point
    dht/store   keeps a record, which its signer delivers
    dht/fetch   returns a page of the records under a digest
    dht/leave   the caller says goodbye: drop its records

Every request but the last carries the caller's addresses, and its reply the callee's clock. Types bound lists and
strings.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from dht.records import KEY_CHARS_MAX
from peer.errors import BarnraiseError
from peer.identity import Signed
from peer.net.rpc import Empty, Method

NODES_MAX: Final = 16  # named in one answer
ADDRESSES_MAX: Final = 8
PAGE_BYTES: Final = 64 << 10
PAGES_MAX: Final = 64  # of one key
FIND_HEADER_BYTES: Final = 48 << 10  # holds the contacts of an answer at their longest

Namespace = Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)]
PeerId = Annotated[str, msgspec.Meta(max_length=128)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
ClockS = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # Unix time; refuses NaN and infinity as well
IssuedUs = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # microseconds of Unix time, until the year 2255
Edition = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Addresses = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)]


class WrongNamespace(BarnraiseError):
    """The peer belongs to another run."""

    exit_code = 4


class Contact(msgspec.Struct, frozen=True):
    """A peer and its addresses."""

    peer: PeerId
    addresses: Addresses


class Request(msgspec.Struct, frozen=True):
    """What every request but the last has."""

    namespace: Namespace
    addresses: Addresses


class FindRequest(Request, frozen=True):
    target: Digest


class FindReply(msgspec.Struct, frozen=True):
    """The nearest known peers, without the caller."""

    nodes: Annotated[tuple[Contact, ...], msgspec.Meta(max_length=NODES_MAX)]
    knew_you: bool
    """Whether the caller was known before this call."""
    clock_s: ClockS


class StoreRequest(Request, frozen=True):
    record: Signed


class StoreReply(msgspec.Struct, frozen=True):
    """The outcome for a record."""

    kept: bool
    newest_us: IssuedUs
    """Issue time of the record that is held now: this one, or a newer one if it was not `kept`."""
    clock_s: ClockS


class FetchRequest(Request, frozen=True):
    """Ask for the first page of a key, then for the others of the same edition."""

    digest: Digest
    page: Annotated[int, msgspec.Meta(ge=0, lt=PAGES_MAX)] = 0
    edition: Edition = 0


class FetchReply(msgspec.Struct, frozen=True):
    """The payload is one page: a msgpack list of `HeldRecord`, `age_s` old."""

    clock_s: ClockS
    pages: Annotated[int, msgspec.Meta(ge=1, le=PAGES_MAX)] = 1
    edition: Edition = 0
    age_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class HeldRecord(msgspec.Struct, frozen=True):
    """A record as a store returns it."""

    signed: Signed
    remaining_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    """How long the store would keep it from the moment at which the page was encoded."""


class LeaveRequest(msgspec.Struct, frozen=True):
    namespace: Namespace


FIND: Final = Method("dht/find", FindRequest, FindReply, access="client", header_bytes=FIND_HEADER_BYTES)
STORE: Final = Method("dht/store", StoreRequest, StoreReply)
FETCH: Final = Method("dht/fetch", FetchRequest, FetchReply, reply_payload_max=PAGE_BYTES, access="client")
LEAVE: Final = Method("dht/leave", LeaveRequest, Empty, access="client")
