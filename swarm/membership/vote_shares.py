"""Votes of a head per invite and per address prefix: identities are free, so these may all be one operator's.

Where the coordinator is a witness, a majority of the members' keys is the run: it can sign other rounds after the
head, also later, when it has left. Peers cannot distinguish one operator's machines from those of several: they warn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network

import msgspec

from peer.net.address_book import is_circuit
from peer.net.address_prefix import RELAYED, announced_prefixes
from swarm.membership.member_record import MemberRecord
from swarm.protocol.head import Head
from swarm.run.agreement import sponsor_name
from swarm.run.manifest import Manifest


class VoteShare(msgspec.Struct, frozen=True, kw_only=True):
    """An invite or an address prefix with at least half of the members of a head, and more than one."""

    invite: str = ""
    """The name of the invite's key, or of the member that invites; empty for a prefix."""
    prefix: str = ""
    """The /24 of IPv4 or the /64 of IPv6; empty for an invite."""
    votes: int
    members: int
    """All members of the head."""
    stage: int | None = None
    """Of a pipeline."""
    is_only: bool = False
    """Whether no other invite, or known prefix, has a member: as in any group of friends that came by one invite."""


class InviteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An invite, or a member that invites, and who came by it."""

    invite: str
    guests: int
    """How many peers it may bring in, directly or through those."""
    peers: tuple[str, ...]
    """Those that came, as the last commits or their own records say."""
    members: int
    """How many of these are members of a last commit."""


def vote_shares(
    manifest: Manifest, head: Head, prefixes: Mapping[str, str], stage: int | None = None
) -> list[VoteShare]:
    """Return what holds half or more of the votes of a head of this run, where that can make a second history: not
    where the coordinator's vote is required. `prefixes`: by peer, as far as they are known. In an open run no share is
    the only one, as any peer may join."""
    members = {member.peer for member in head.members}
    if manifest.agreement_mode == "required":
        return []

    def large(names: Iterable[str], *, invites: bool) -> Iterator[VoteShare]:
        counted = Counter(names)
        is_only = len(counted) == 1 and not manifest.open
        for name, votes in counted.most_common():
            if votes > 1 and 2 * votes >= len(members):
                invite, prefix = (name, "") if invites else ("", name)
                yield VoteShare(
                    invite=invite, prefix=prefix, votes=votes, members=len(members), stage=stage, is_only=is_only
                )

    keys = (entry.sponsor.key for entry in head.sponsored if entry.peer in members)
    places = (prefix for peer, prefix in prefixes.items() if peer in members and _is_a_place(prefix))
    return [*large(keys, invites=True), *large(places, invites=False)]


def alarms(shares: Iterable[VoteShare]) -> list[VoteShare]:
    """Return the shares to warn of: those beside which another invite or prefix has members. For a group that came by
    one invite, its coordinator warns once, and so does `peer status --guests`."""
    return [share for share in shares if not share.is_only]


def prefixes_told(records: Mapping[str, MemberRecord]) -> dict[str, str]:
    """Return the prefix of each peer that publishes its addresses: a public one, or that of its network where it names
    no other. Peers behind a relay publish too little."""
    found: dict[str, str] = {}
    for peer, record in records.items():
        direct = tuple(address for address in record.addresses if not is_circuit(address))
        prefixes = sorted(announced_prefixes(direct))
        public = [prefix for prefix in prefixes if ip_network(prefix).is_global]
        told = public or (prefixes if len(direct) == len(record.addresses) else [])
        if told:
            found[peer] = told[0]
    return found


def invites_of(heads: Iterable[Head], records: Mapping[str, MemberRecord]) -> list[InviteStatus]:
    """Return who came by which invite, the one with the most members first. An open run has none."""
    may, came, members = dict[str, int](), dict[str, set[str]](), set[str]()
    for head in heads:
        members |= {member.peer for member in head.members}
        for entry in head.sponsored:
            may[entry.sponsor.key] = entry.sponsor.guests
            came.setdefault(entry.sponsor.key, set()).add(entry.peer)
    for peer, record in records.items():
        for link in record.credential[:-1]:
            may[sponsor_name(link.key)] = link.guests
            came.setdefault(sponsor_name(link.key), set()).add(peer)
    found = [
        InviteStatus(invite=name, guests=may[name], peers=tuple(sorted(peers)), members=len(peers & members))
        for name, peers in came.items()
    ]
    return sorted(found, key=lambda status: (-status.members, -len(status.peers), status.invite))


def caution(share: VoteShare) -> str:
    """Return the warning about it: one sentence."""
    of = "" if share.stage is None else f" of stage {share.stage}"
    who = f"the invite {share.invite[:8]}" if share.invite else f"the address prefix {share.prefix}"
    came = "came by" if share.invite else "are at"
    return (
        f"{share.votes} of {share.members} members{of} {came} {who}: if these are one person's, that person decides"
        " what this run's history is"
    )


def _is_a_place(prefix: str) -> bool:
    """Return whether a prefix is of a network: neither of this machine alone, nor unknown."""
    return prefix != RELAYED and not ip_network(prefix).is_loopback
