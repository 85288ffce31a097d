"""The record that a block server publishes of itself. Clients and other servers route and place by it; nothing in it is
trusted beyond that."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from dht.records import Schema
from peer.bounds import UnixTime
from peer.ipc.span import Span
from swarm.membership.member_record import (
    ADDRESSES_MAX,
    CREDENTIAL_BYTES_MAX,
    RECORD_BYTES_MAX,
    Address,
    Amount,
    Text,
    Total,
    vouched,
)
from swarm.run.credentials import Chain
from swarm.run.gate import Gate

BLOCKS_MAX: Final = 1 << 12
Block = Annotated[int, msgspec.Meta(ge=0, le=BLOCKS_MAX)]


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One block server as it describes itself. Times are seconds since the Unix epoch."""

    session: Text
    """Another one after each start."""
    name: Text
    version: Text
    addresses: Annotated[list[Address], msgspec.Meta(max_length=ADDRESSES_MAX)]
    joined_at: UnixTime
    at: UnixTime
    first: Block
    """The blocks that it serves, from `first` to before `end`."""
    end: Block
    since: Amount = 0.0
    """When it chose them."""
    ready_at: Amount = 0.0
    """When it expects to serve them."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    wire: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=16)], ...], msgspec.Meta(max_length=8)] = ()
    """The types that sessions may choose for hidden states on the wire; those that this peer does not know, too."""
    pages: Total = 0
    """Room for keys and values: pages of all its blocks, 16 tokens each."""
    pages_free: Total = 0
    sessions: Total = 0
    waiting_tokens: Total = 0
    step_ms: Amount = 0.0
    """The time of one step, measured while it serves; 0 before."""
    uplink_bytes_s: Amount = 0.0
    """The rate at which hidden states of prompts leave, where that was what they waited for; 0: it was not yet."""
    tokens: Total = 0
    """Served since it started, all positions of all sessions."""
    bytes_up: Total = 0
    bytes_down: Total = 0
    pinned: bool = False
    """Whether the user chose the blocks."""
    leaving: bool = False
    """Whether it takes no new sessions."""
    credential: Chain = ()
    """In a closed swarm, what makes the peer a member."""

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        for text in (self.session, self.name, self.version, *self.addresses, *self.wire):
            if not text.isprintable():
                raise ValueError(f"a server record with the text {text!a} is not printable")
        if not self.first < self.end:
            raise ValueError(f"a server record has blocks [{self.first}, {self.end}): at least one is needed")

    def serves(self, now: float) -> bool:
        """Whether the server answers, and not only plans to."""
        return self.ready_at <= now

    def span(self, of: int) -> Span | None:
        """Return its blocks, of a model of so many; None if it has none of these."""
        return Span(self.first, min(self.end, of), of) if self.first < of else None


def servers_key(run_id: str) -> str:
    """Return the key of the servers' records."""
    return f"{run_id}/serve"


SERVERS: Final = Schema[ServerRecord](
    name="server",
    type=ServerRecord,
    ttl_max_s=60.0,
    size_max=RECORD_BYTES_MAX + CREDENTIAL_BYTES_MAX,
    signer=lambda key, peer: True,
    keys=lambda namespace, key: key == servers_key(namespace),
)


def server_schema(gate: Gate) -> Schema[ServerRecord]:
    """Return the schema of the served model that `gate` guards."""
    return vouched(SERVERS, gate)
