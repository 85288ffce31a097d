"""The record that a block server publishes of itself. Clients and other servers route and place by it; nothing in it is
trusted beyond that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from dht.records import Schema
from peer.bounds import UnixTime
from peer.errors import ConfigError
from peer.ipc.block_messages import WireType
from peer.ipc.span import Span
from swarm.membership.member_record import (
    ADDRESSES_MAX,
    CREDENTIAL_BYTES_MAX,
    RECORD_BYTES_MAX,
    Address,
    Amount,
    Text,
    Total,
    member_schema,
    vouched,
)
from swarm.pages.holdings import holdings_schema
from swarm.run.credentials import Chain
from swarm.run.gate import Gate
from swarm.run.manifest import Manifest

BLOCKS_MAX: Final = 1 << 12
COMMIT_BYTES: Final = 16
COMMITS_MAX: Final = 2
Block = Annotated[int, msgspec.Meta(ge=0, le=BLOCKS_MAX)]


class ServedCommit(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A commit of a training run whose weights a server has."""

    round: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    name: Annotated[bytes, msgspec.Meta(min_length=COMMIT_BYTES, max_length=COMMIT_BYTES)]
    """The first bytes of the head's hash; of a pipeline, of the hash of all stages' heads."""


@dataclass(frozen=True)
class SessionNeeds:
    """What a session asks for that not every server knows."""

    wire: WireType | None = None
    """The type of hidden states on the wire; None: the servers' own."""
    options: tuple[str, ...] = ()
    """How the last server draws tokens (`Sampling.options`)."""
    adapter: bytes = b""
    """The tag of a served model's adapter, which all its servers have; empty for none."""


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
    options: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=16)], ...], msgspec.Meta(max_length=8)] = ()
    """The settings of sampling that it knows beside those of the first servers, which ignore them."""
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
    commits: Annotated[tuple[ServedCommit, ...], msgspec.Meta(max_length=COMMITS_MAX)] = ()
    """Of a training run: the commits that it serves, newest first."""
    credential: Chain = ()
    """In a closed swarm, what makes the peer a member."""

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        for text in (self.session, self.name, self.version, *self.addresses, *self.wire, *self.options):
            if not text.isprintable():
                raise ValueError(f"a server record with the text {text!a} is not printable")
        if not self.first < self.end:
            raise ValueError(f"a server record has blocks [{self.first}, {self.end}): at least one is needed")

    @property
    def role(self) -> str:
        return "server"

    def serves(self, now: float) -> bool:
        """Whether the server answers, and not only plans to."""
        return self.ready_at <= now

    def has(self, commit: ServedCommit | None) -> bool:
        """Whether it serves that commit; None for a served model, which has none."""
        return commit in self.commits if commit is not None else not self.commits

    def takes(self, needs: SessionNeeds, of: int) -> bool:
        """Whether a session may ask it for these, in a model of this many blocks. A server of the last one draws."""
        draws = self.end >= of
        return needs.wire in (None, *self.wire) and (not draws or {*needs.options} <= {*self.options})

    def span(self, of: int) -> Span | None:
        """Return its blocks, of a model with this many; None if it has none of these."""
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


def run_schemas(gate: Gate) -> list[Schema[Any]]:
    """Return the kinds of records that the peers of the training run publish which `gate` guards: those that train,
    those that serve its last commit, and those that keep pages of its data set."""
    return [member_schema(gate), server_schema(gate), holdings_schema(gate)]


def check_commits(manifest: Manifest) -> None:
    """Raise ConfigError for a run that has no commits to serve."""
    if not manifest.outer.has_common_state:
        raise ConfigError(
            f"{manifest.name!r} is a gossip run, whose peers each have weights of their own, so it has no commit to"
            " serve: export one peer's, and use that with --model"
        )
