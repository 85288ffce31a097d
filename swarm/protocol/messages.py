"""The calls of rounds besides the messages of the agreement: slices, and a peer's head for those that only look."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from optim.bundles import BUNDLES_MAX
from peer.bounds import SLICES_MAX, Count, Hash, Name, Text
from peer.net.method import Empty
from peer.net.rpc import Method
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.protocol.agreement.proof import HeadProof
from swarm.protocol.head import Head, Member

HEADS_MAX: Final = 256  # in one page
JUDGED_MAX: Final = 64  # names in one list
BUNDLE_SLICES_MAX: Final = -(-SLICES_MAX // BUNDLES_MAX)
SLICE_BYTES_MAX: Final = 9 << 20  # one slice at 32 bits a value, with room for scales


SliceHashes = Annotated[tuple[Hash, ...], msgspec.Meta(max_length=BUNDLE_SLICES_MAX)]


class SliceOf(msgspec.Struct, frozen=True):
    """The header of one encoded slice in the payload: of the sender's update, or of the merged result."""

    key: Hash
    """The hash of the attempt's roster."""
    index: Count
    contributor: Name = ""
    """Whose update it is of, where another peer passes it on or shows it; empty for the sender's."""
    hashes: SliceHashes = ()
    """Of the contributor's slices in the same bundle, if there are several; what was committed to is the hash of
    these."""
    flows: Count = 0
    """How many slices the sender sends at that moment, to all peers: its link carries as many times the rate of this
    one."""


class ShownSlice(msgspec.Struct, frozen=True):
    """The header of a slice of a contributor, in the payload."""

    hashes: SliceHashes = ()
    """As in `SliceOf`."""


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
    """The proof of the head (`swarm.protocol.agreement.proof`); empty where there is none, or none that fits into a
    reply."""
    kept: bool = False
    """Of the coordinator's: whether it serves the state of that head, which it does at a run's two ends."""


class AskHeads(msgspec.Struct, frozen=True):
    """A request for the heads that led to one."""

    group: Name
    """The id of the group (a head's `run_id`)."""
    head: Hash
    """The hash of the head to begin with, for instance one that is proved."""
    after: Hash = b""
    """The hash of the head before which to end; empty for none."""


class HeadPage(msgspec.Struct, frozen=True):
    """Heads that led to the one that was asked for, that one first; each is the one before the last, by its hash. Empty
    where the receiver does not know that head, or keeps it no more."""

    heads: Annotated[tuple[Head, ...], msgspec.Meta(max_length=HEADS_MAX)]


class JudgedPeers(msgspec.Struct, frozen=True):
    """Whose updates make the loss worse, as the sender has measured: its word, which nothing proves."""

    suspects: Annotated[tuple[Name, ...], msgspec.Meta(max_length=JUDGED_MAX)] = ()
    """Found so once, and to be checked again."""
    left_out: Annotated[tuple[Name, ...], msgspec.Meta(max_length=JUDGED_MAX)] = ()
    """Found so again: the sender leaves them out of the rounds that it leads."""


CONTRIBUTION: Final = Method("exchange.contribution", SliceOf, Empty, request_payload_max=SLICE_BYTES_MAX)
RELAY: Final = Method("exchange.relay", SliceOf, Empty, request_payload_max=SLICE_BYTES_MAX)
RESULT: Final = Method("exchange.result", SliceOf, Empty, request_payload_max=SLICE_BYTES_MAX)
FETCH_RESULT: Final = Method("exchange.fetch", SliceOf, Empty, reply_payload_max=SLICE_BYTES_MAX)
SHOW: Final = Method("exchange.show", SliceOf, ShownSlice, reply_payload_max=SLICE_BYTES_MAX)
ACCUSE: Final = Method("exchange.accuse", SliceOf, Empty)
HEAD_REPORT: Final = Method("run.head", AskHead, HeadReport, access="client", header_bytes=LARGE_HEADER_BYTES)
HEADS: Final = Method("run.heads", AskHeads, HeadPage, access="client", header_bytes=LARGE_HEADER_BYTES)
JUDGED: Final = Method("run.judged", Empty, JudgedPeers, access="client")
