"""The four calls between nodes. All are open: a peer must find the others before it can be admitted by them.

dht/find    who is nearest to a point?            Every request carries the caller's own addresses, every reply
dht/store   keep this record (its owner asks)     the clock of who answers. Lists and strings are bounded by type.
dht/fetch   what is held under this digest?
dht/leave   the caller goes, and its records with it
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from dht.records import KEY_CHARS_MAX
from peer.errors import BarnraiseError
from peer.identity import Signed
from peer.net.rpc import Method

NODES_MAX: Final = 16  # named in one answer
ADDRESSES_MAX: Final = 8
FETCH_BYTES_MAX: Final = 2 << 20

Namespace = Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)]
PeerId = Annotated[str, msgspec.Meta(max_length=128)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
ClockS = Annotated[float, msgspec.Meta(ge=0, le=1e11)]  # Unix time; refuses NaN and infinity as well
IssuedUs = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # microseconds of Unix time, until the year 2255
Addresses = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)]


class WrongNamespace(BarnraiseError):
    """The peer belongs to another run."""

    exit_code = 4


class Contact(msgspec.Struct, frozen=True):
    """A peer and where it listens."""

    peer: PeerId
    addresses: Addresses


class FindRequest(msgspec.Struct, frozen=True):
    namespace: Namespace
    addresses: Addresses
    target: Digest


class FindReply(msgspec.Struct, frozen=True):
    """The nearest known peers, without the asker; whether the asker was known before this call."""

    nodes: Annotated[tuple[Contact, ...], msgspec.Meta(max_length=NODES_MAX)]
    knew_you: bool
    clock_s: ClockS


class StoreRequest(msgspec.Struct, frozen=True):
    namespace: Namespace
    addresses: Addresses
    record: Signed


class StoreReply(msgspec.Struct, frozen=True):
    """`newest_us` is the issue time of what is held now: that of the record, or, if not `kept`, of a newer one."""

    kept: bool
    newest_us: IssuedUs
    clock_s: ClockS


class FetchRequest(msgspec.Struct, frozen=True):
    namespace: Namespace
    addresses: Addresses
    digest: Digest


class FetchReply(msgspec.Struct, frozen=True):
    """The payload is msgpack of a list of Held."""

    clock_s: ClockS


class HeldRecord(msgspec.Struct, frozen=True):
    """A record as a store hands it out, and how long it would go on keeping it."""

    signed: Signed
    remaining_s: Annotated[float, msgspec.Meta(le=1e9)]  # which refuses NaN


class LeaveRequest(msgspec.Struct, frozen=True):
    namespace: Namespace


class LeaveReply(msgspec.Struct, frozen=True):
    pass


FIND: Final = Method("dht/find", FindRequest, FindReply, open=True)
STORE: Final = Method("dht/store", StoreRequest, StoreReply, open=True)
FETCH: Final = Method("dht/fetch", FetchRequest, FetchReply, reply_payload_max=FETCH_BYTES_MAX, open=True)
LEAVE: Final = Method("dht/leave", LeaveRequest, LeaveReply, open=True)
