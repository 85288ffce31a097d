"""What the peers of one run say to each other during rounds. State transfer has its own calls in
`swarm.state.snapshots`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.identity import Signed
from peer.net.rpc import Method
from swarm.protocol.head import Count, Hash, Head, Member, Name
from swarm.protocol.paxos import Accepted
from swarm.protocol.plan import Roster

SLICE_BYTES_MAX: Final = 9 << 20  # one slice at 32 bits a value, with room for scales
BELIEVED_MAX: Final = 32


class Done(msgspec.Struct, frozen=True):
    """The empty answer."""


class Prepare(msgspec.Struct, frozen=True):
    """Phase 1: the leader of `attempt` asks for a promise. `addresses`: where the others of the group can be
    dialled."""

    head: Head
    attempt: Count
    addresses: dict[str, tuple[str, ...]]


class Promise(msgspec.Struct, frozen=True):
    """`granted` is false if a later attempt was promised, or if the two heads differ: then `head` tells which is ahead.
    `plan` (signed by its leader) and `contribution` are what this member already has for the round; as an owner it
    still waits for slices of the `missing`, and for results of the `silent`. `accepted` is its vote, and what is needed
    to finish what it voted for: the roster and the plan that led there."""

    granted: bool
    promised: Count
    head: Head
    member: Member
    speed: float = 0.0
    plan: Signed | None = None
    contribution: Signed | None = None
    accepted: Accepted | None = None
    accepted_roster: Roster | None = None
    accepted_plan: Signed | None = None
    missing: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    bandwidths: dict[str, float] = {}


class StartRound(msgspec.Struct, frozen=True):
    """Start computing; `plan` is a signed `WorkPlan`. With `finish_early`, stop where you are and hand in what you
    have."""

    plan: Signed
    finish_early: bool = False


class Submit(msgspec.Struct, frozen=True):
    """A contributor has finished; `contribution` is a signed `Contribution`."""

    contribution: Signed


class StartExchange(msgspec.Struct, frozen=True):
    """Phase 2 begins: exchange the slices of this roster."""

    roster: Roster


class SliceOf(msgspec.Struct, frozen=True):
    """The payload is one encoded slice: of the sender's pseudo-gradient, or (as a result) of the merged update.
    `key` is the hash of the attempt's roster."""

    key: Hash
    index: Count


class Finish(msgspec.Struct, frozen=True):
    """Phase 2 of an attempt that must finish what an earlier one voted for; `holder` has the merged slices of `roster`,
    which was made under `plan`."""

    attempt: Count
    accepted: Accepted
    plan: Signed
    roster: Roster
    holder: str


class Vote(msgspec.Struct, frozen=True):
    """The sender votes for the head named by hash `choice`."""

    head: Hash
    attempt: Count
    choice: Hash
    member: Member


class VoteSeen(msgspec.Struct, frozen=True):
    """`current` is the answerer's head hash: equal to the choice if it has committed it already."""

    current: bytes


class AskHead(msgspec.Struct, frozen=True):
    """Where do you stand in the group of that id (a head's `run_id`)? Empty: in the only one you are in."""

    group: Name = ""


class HeadReport(msgspec.Struct, frozen=True):
    """Where a peer stands. `signed` is the authority's signature of `head`, if that head began a term."""

    head: Head
    member: Member
    phase: str
    regroup: Signed | None = None


class JoinRequest(msgspec.Struct, frozen=True):
    """The sender, who listens at `addresses`, holds the state of the head named by hash `head`, of round `round`, and
    asks to be planned for in `group` (as in `AskHead`)."""

    head: Hash
    round: Count
    member: Member
    addresses: tuple[str, ...]
    group: Name = ""


class Regroup(msgspec.Struct, frozen=True):
    """A head of a new term, signed by the authority, and where its members can be dialled."""

    signed: Signed
    addresses: dict[str, tuple[str, ...]]


class AskBelieved(msgspec.Struct, frozen=True):
    """Which of these heads of `group`, by (hash, round), would you begin a term from, if the sender stood there? The
    first is the sender's own; of the others it has heard."""

    group: Name
    heads: Annotated[tuple[tuple[Hash, Count], ...], msgspec.Meta(max_length=BELIEVED_MAX)]


class Believed(msgspec.Struct, frozen=True):
    """Their hashes; `last`: the height of the head that the authority saw last."""

    last: tuple[Count, Count]
    heads: tuple[Hash, ...]


PREPARE: Final = Method("round.prepare", Prepare, Promise)
START_ROUND: Final = Method("round.start", StartRound, Done)
SUBMIT: Final = Method("round.submit", Submit, Done)
START_EXCHANGE: Final = Method("round.exchange", StartExchange, Done)
FINISH: Final = Method("round.finish", Finish, Done)
VOTE: Final = Method("round.vote", Vote, VoteSeen)
CONTRIBUTION: Final = Method("exchange.contribution", SliceOf, Done, request_payload_max=SLICE_BYTES_MAX)
RESULT: Final = Method("exchange.result", SliceOf, Done, request_payload_max=SLICE_BYTES_MAX)
FETCH_RESULT: Final = Method("exchange.fetch", SliceOf, Done, reply_payload_max=SLICE_BYTES_MAX)
HEAD_REPORT: Final = Method("run.head", AskHead, HeadReport)
REQUEST_JOIN: Final = Method("run.request_join", JoinRequest, HeadReport)
REGROUP: Final = Method("run.regroup", Regroup, HeadReport)
NEED_REGROUP: Final = Method("authority.need_regroup", AskHead, HeadReport)
BELIEVED: Final = Method("authority.believed", AskBelieved, Believed)

REGROUP_KIND: Final = "regroup"
NO_MAJORITY: Final = "waiting for a majority"  # the phase of a member that cannot go on by itself
