"""Events of an agreement node: the inputs of `AgreementNode.step`. All are values; none has a method that does I/O.

The driver makes them: from calls of other peers, timers, threads that merge and build, files, the operator's commands.
"""

from __future__ import annotations

import msgspec

from peer.identity import Signed
from swarm.protocol.agreement.messages import Message
from swarm.protocol.ledger import Ranges


class Started(msgspec.Struct, frozen=True):
    """The process has started. The first event of every node, once."""

    records: dict[str, bytes]
    """The records on disk from `Persist`, by key; empty on a new disk."""
    states: tuple[bytes, ...]
    """Hashes of the states that the disk holds or can rebuild: the genesis state, a committed or an accepted one."""
    session: str
    """A fresh random name of this process (64 bits). It becomes the incarnation of a peer whose disk has no votes, and
    it is the boot id of a coordinator."""
    seed: bytes
    """32 random bytes. All that the node must choose unpredictably follows from them."""
    restored: bool = False
    """The coordinator's disk was put back from a backup, as the operator says (`peer coordinate --restored`)."""


class Received(msgspec.Struct, frozen=True):
    """A message has come from `peer`, whose id the connection has proved."""

    peer: str
    message: Message


class TimerFired(msgspec.Struct, frozen=True):
    """A timer that `SetTimer` has set is due. One that fires late, early or twice does no harm."""

    id: str


class Persisted(msgspec.Struct, frozen=True):
    """The record of the `Persist` with that id, and all before it, are on disk: file and directory are synced."""

    id: int


class Submitted(msgspec.Struct, frozen=True):
    """This peer's own work under a plan is done: a signed `swarm.protocol.plan.Contribution`."""

    contribution: Signed
    speed: float = 0.0
    """Measurements inner steps a second; 0 while unknown."""


class LinksMeasured(msgspec.Struct, frozen=True):
    """This peer's measurements of the links of others, by peer: the codes of `swarm.protocol.shares.links_of`."""

    rates: dict[str, bytes]


class Paused(msgspec.Struct, frozen=True):
    """This machine's owner has paused the peer's work, or resumed it (`paused` false). A paused node votes, but does
    not ask to join, and as a leader plans no work for itself that another member can do."""

    paused: bool


class Gathered(msgspec.Struct, frozen=True):
    """The method says that the members together have done the round's work (a pipeline's batch is counted)."""

    head: bytes
    claims: dict[str, Ranges]
    """The samples that each peer, by id, claims to have counted. One that does not submit them must forget its samples;
    the peers to ask are `AgreementNode.workers`."""


class SliceResult(msgspec.Struct, frozen=True):
    """This peer, as owner, has merged slice `index` of the exchange `key`; `hash` names the encoded result."""

    key: bytes
    index: int
    hash: bytes


class Built(msgspec.Struct, frozen=True):
    """The next state was built, as `MergeSlices` or `Build` asked for, and has this hash; None if the slices that
    `Build` named could not be fetched."""

    key: bytes
    """Of the exchange."""
    name: bytes
    """Of what was built from: see `name_build`."""
    state_hash: bytes | None


class StateFetched(msgspec.Struct, frozen=True):
    """The answer to `Fetch`: whether the state with this hash was fetched and verified. Also unasked, if a state of
    `Started` turns out to be damaged."""

    state_hash: bytes
    ok: bool


class Missing(msgspec.Struct, frozen=True):
    """What the exchange `key` still waits for at this peer. The driver reports it once the exchange takes too long."""

    key: bytes
    contributors: tuple[str, ...]
    """Peers whose slices this peer, as an owner, lacks."""
    owners: tuple[str, ...]
    """Owners whose results this peer lacks."""


class Judged(msgspec.Struct, frozen=True):
    """The peers whose contributions this one leaves out as a leader, by its own checks."""

    peers: tuple[str, ...]


class RegroupRequested(msgspec.Struct, frozen=True):
    """The operator's command to the coordinator: `peer regroup`."""

    without: tuple[str, ...] = ()
    """Peers that must not be members of this term and those that follow (`--without PEER`)."""
    readmit: tuple[str, ...] = ()
    """Peers of earlier requests that may be members again (`--readmit PEER`)."""
    undo: bool = False
    """Whether the operator agrees to undo certified rounds whose state no peer can bring."""
    all_named: bool = False
    """Whether a member that neither answers nor is in `without` stops the request: it may be alive and continue
    elsewhere, and its work is then lost."""


class PeerDown(msgspec.Struct, frozen=True):
    """The failure detector suspects that peer. It may be wrong: only waiting gets shorter."""

    peer: str


class PeerUp(msgspec.Struct, frozen=True):
    """A peer answers (again); so a node also learns of peers of its run that are in no head."""

    peer: str


Event = (
    Started
    | Received
    | TimerFired
    | Persisted
    | Submitted
    | LinksMeasured
    | Paused
    | Gathered
    | SliceResult
    | Built
    | StateFetched
    | Missing
    | Judged
    | RegroupRequested
    | PeerDown
    | PeerUp
)
