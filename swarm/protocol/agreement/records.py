"""Records that a node keeps on disk, by key. Each record replaces the one under its key."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.bounds import Count, Hash, Names
from peer.decoding import MALFORMED
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.head import Head

IDENTITY_KEY: Final = "identity"  # a voter's incarnation, as text
BALLOT_KEY: Final = "ballot"
RESTORED_KEY: Final = "restored"  # of a coordinator that waits for the operator: not empty
OPERATOR_KEY: Final = "operator"  # of a coordinator
CHOSEN_KEPT: Final = 8
LINK_KEY: Final = "link/"
LINKS_KEPT: Final = 4096  # heads that a node can prove to others, on disk: some kilobytes each. In memory it has fewer
# of large groups (`links.py`). A coordinator that was away for more rounds finds no chain from its head to theirs.


class LinkRecord(msgspec.Struct, frozen=True):
    """One link on disk. The records of a ring: number n lies under key n % LINKS_KEPT."""

    number: Count
    link: msg.ChainLink
    stands: bool
    """Whether this node was at this head; else it was only on the path to it."""


class BallotRecord(msgspec.Struct, frozen=True):
    """A voter's promises and votes on disk."""

    head: Hash
    ballot: Ballot
    accepted: msg.AcceptedValue | None
    support: msg.Support | None


class OperatorRecord(msgspec.Struct, frozen=True):
    """A coordinator's last regroup, as it must be known after a restart."""

    without: Names = ()
    """Peers that no start takes in, until the operator says otherwise."""
    chosen: Annotated[tuple[Head, ...], msgspec.Meta(max_length=CHOSEN_KEPT)] = ()
    """The last values from which starts began though no votes for them were known."""


def operator_record(records: dict[str, bytes]) -> OperatorRecord:
    """Return what the disk holds of the last regroup; nothing, if it cannot be read."""
    try:
        return msgspec.msgpack.decode(records[OPERATOR_KEY], type=OperatorRecord)
    except (KeyError, *MALFORMED):
        return OperatorRecord()


def links_in(records: dict[str, bytes]) -> list[LinkRecord]:
    """Return the links up to a node's head, in order."""
    found: list[LinkRecord] = []
    for key in sorted(records):
        if key.startswith(LINK_KEY):
            try:
                found.append(msgspec.msgpack.decode(records[key], type=LinkRecord))
            except MALFORMED:  # a torn record never counted; without it the chain begins later
                continue
    found.sort(key=lambda record: record.number)
    while found and not found[-1].stands:  # a crash on its way to a head that it never reached
        found.pop()
    return found


def is_damaged(records: dict[str, bytes]) -> bool:
    """Return whether a record cannot be read: then promises and votes may have been lost with it."""
    for key, record in records.items():
        try:
            if key == BALLOT_KEY:
                msgspec.msgpack.decode(record, type=BallotRecord)
            elif key.startswith(LINK_KEY):
                msgspec.msgpack.decode(record, type=LinkRecord)
        except MALFORMED:
            return True
    return False
