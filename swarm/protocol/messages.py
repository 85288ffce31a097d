"""The messages of rounds between the peers of a run. State transfer has its own, in `swarm.state.messages`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.bounds import MEMBERS_MAX, Addresses, AddressesOf, Count, Hash, Name, Names, Rate, Text
from peer.identity import Signed
from peer.net.rpc import Method
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.protocol.agreement.proof import HeadProof
from swarm.protocol.head import Head, Member
from swarm.protocol.paxos import Accepted
from swarm.protocol.plan import Roster

SLICE_BYTES_MAX: Final = 9 << 20  # one slice at 32 bits a value, with room for scales
BELIEVED_MAX: Final = 32


class Done(msgspec.Struct, frozen=True):
    """An empty answer."""


class Prepare(msgspec.Struct, frozen=True):
    """Phase 1: the leader of `attempt` asks for a promise."""

    head: Head
    attempt: Count
    addresses: AddressesOf
    """Addresses of the peers of the group, by peer id."""


class Promise(msgspec.Struct, frozen=True):
    """The answer to `Prepare`: a member's promise, or its refusal."""

    granted: bool
    """False if a later attempt was promised, or if the heads differ."""
    promised: Count
    """The latest attempt this member has promised."""
    head: Head
    """This member's head; if the heads differ, it tells which side is ahead."""
    member: Member
    speed: Rate = 0.0
    """Measured inner steps a second; 0 while unknown."""
    plan: Signed | None = None
    """The `WorkPlan` this member has accepted, signed by the plan's leader."""
    contribution: Signed | None = None
    """This member's contribution, if it is ready."""
    accepted: Accepted | None = None
    """This member's latest vote; the next two fields are needed to finish the head voted for."""
    accepted_roster: Roster | None = None
    accepted_plan: Signed | None = None
    missing: Names = ()
    """Peers whose slices this member, as an owner, still waits for."""
    silent: Names = ()
    """Owners whose results this member still waits for."""
    bandwidths: Annotated[dict[Name, Rate], msgspec.Meta(max_length=MEMBERS_MAX)] = {}
    """Measured bytes/s to other members, by peer id."""


class StartRound(msgspec.Struct, frozen=True):
    """The order to compute under a plan."""

    plan: Signed
    """A signed `WorkPlan`."""
    finish_early: bool = False
    """Stop after the present step and submit what there is."""


class Submit(msgspec.Struct, frozen=True):
    """A finished contribution; `contribution` is a signed `Contribution`."""

    contribution: Signed


class StartExchange(msgspec.Struct, frozen=True):
    """The order to begin phase 2: exchange the slices of this roster."""

    roster: Roster


class SliceOf(msgspec.Struct, frozen=True):
    """The header of one encoded slice in the payload: of the sender's update, or of the merged result."""

    key: Hash
    """The hash of the attempt's roster."""
    index: Count


class Finish(msgspec.Struct, frozen=True):
    """The order to finish, in `attempt`, a head that members voted for in an earlier attempt."""

    attempt: Count
    accepted: Accepted
    plan: Signed
    """The plan of `roster`."""
    roster: Roster
    holder: Name
    """The peer that has the merged slices of `roster`."""


class Vote(msgspec.Struct, frozen=True):
    """A vote for the head with hash `choice`."""

    head: Hash
    attempt: Count
    choice: Hash
    member: Member


class VoteSeen(msgspec.Struct, frozen=True):
    """The answer to a vote."""

    current: Hash
    """The hash of the receiver's head; it equals the choice if the receiver has already committed it."""


class AskHead(msgspec.Struct, frozen=True):
    """A request for the receiver's head."""

    group: Name = ""
    """The id of the group (a head's `run_id`); empty for the receiver's only group."""


class HeadReport(msgspec.Struct, frozen=True):
    """A peer's report of its head. It counts only as far as it is proved."""

    head: Head
    member: Member
    phase: Text
    links: HeadProof = ()
    """What proves the head (`swarm.protocol.agreement.proof`); empty where there is no proof, or none that fits into a
    reply."""
    regroup: Signed | None = None
    """Of the older rules: the first head of the term, signed by the authority."""


class JoinRequest(msgspec.Struct, frozen=True):
    """A request to join a group by a peer that holds the state of a head."""

    head: Hash
    """The hash of that head."""
    round: Count
    """The round of that head."""
    member: Member
    addresses: Addresses
    group: Name = ""
    """As in `AskHead`."""


class Regroup(msgspec.Struct, frozen=True):
    """A head of a new term."""

    signed: Signed
    """The `Head`, signed by the authority."""
    addresses: AddressesOf
    """Addresses of its members, by peer id."""


class AskBelieved(msgspec.Struct, frozen=True):
    """A question to the authority: from which of these heads would it begin a term if the sender held that head?"""

    group: Name
    heads: Annotated[tuple[tuple[Hash, Count], ...], msgspec.Meta(max_length=BELIEVED_MAX)]
    """(hash, round) of each head: first the sender's own, then those it was told of."""


class Believed(msgspec.Struct, frozen=True):
    """The answer to `AskBelieved`."""

    last: tuple[Count, Count]
    """The position (term, round) of the latest head that the authority has seen."""
    heads: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=BELIEVED_MAX)]
    """The hashes of the heads it would begin a term from."""


PREPARE: Final = Method("round.prepare", Prepare, Promise, header_bytes=LARGE_HEADER_BYTES)
START_ROUND: Final = Method("round.start", StartRound, Done, header_bytes=LARGE_HEADER_BYTES)
SUBMIT: Final = Method("round.submit", Submit, Done, header_bytes=LARGE_HEADER_BYTES)
START_EXCHANGE: Final = Method("round.exchange", StartExchange, Done, header_bytes=LARGE_HEADER_BYTES)
FINISH: Final = Method("round.finish", Finish, Done, header_bytes=LARGE_HEADER_BYTES)
VOTE: Final = Method("round.vote", Vote, VoteSeen)
CONTRIBUTION: Final = Method("exchange.contribution", SliceOf, Done, request_payload_max=SLICE_BYTES_MAX)
RESULT: Final = Method("exchange.result", SliceOf, Done, request_payload_max=SLICE_BYTES_MAX)
FETCH_RESULT: Final = Method("exchange.fetch", SliceOf, Done, reply_payload_max=SLICE_BYTES_MAX)
HEAD_REPORT: Final = Method("run.head", AskHead, HeadReport, access="client", header_bytes=LARGE_HEADER_BYTES)
REQUEST_JOIN: Final = Method("run.request_join", JoinRequest, HeadReport, header_bytes=LARGE_HEADER_BYTES)
REGROUP: Final = Method("run.regroup", Regroup, HeadReport, header_bytes=LARGE_HEADER_BYTES)
NEED_REGROUP: Final = Method("authority.need_regroup", AskHead, HeadReport, header_bytes=LARGE_HEADER_BYTES)
BELIEVED: Final = Method("authority.believed", AskBelieved, Believed)

REGROUP_KIND: Final = "regroup"
NO_MAJORITY: Final = "waiting for a majority"  # the phase of a member whose group has lost its majority
