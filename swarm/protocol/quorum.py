"""Finding the run's current head: for joiners, and for peers that were frozen or missed a vote.

No single peer is believed. A peer knows a group: the members of its own head, or those of a later term that the
authority signed. If a majority of that group answers, the peer follows the head of a majority of the group and no
other. If the peer knows no group, or its group has dissolved, a head counts if a majority of the head's own members has
committed it. A head that the authority signed always counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import trio

from peer.errors import BarnraiseError, DialError, ProtocolViolation
from peer.identity import Signed, open_body
from peer.net.rpc import Rpc
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import HEAD_REPORT, REGROUP_KIND, AskHead, HeadReport

POLL_S: Final = 4.0
ASKED_MAX: Final = 64  # besides the members of a head, which others must not crowd out


@dataclass(frozen=True)
class HeadCandidate:
    """A head that enough reports support."""

    head: Head
    holders: tuple[str, ...]
    """The peers that report this head or its successor. Both kinds hold its state."""
    regroup: Signed | None
    """The first head of its term, signed by the authority; None in term 0."""


def open_regroup(signed: Signed, authority: str, run_id: str) -> Head:
    """Return the head with which the authority began a term. Raise `ProtocolViolation` if another peer signed it."""
    head = open_body(signed, REGROUP_KIND, Head, signer=authority)
    if head.run_id != run_id:
        raise ProtocolViolation("a regroup belongs to another run")
    return head


def rank_heads(
    head_reports: Iterable[tuple[str, HeadReport]],
    authority: str,
    genesis: Head,
    me: Member | None = None,
    mine: Head | None = None,
    unheard: int = 0,
) -> list[HeadCandidate]:
    """Return the heads that count, best first.

    `head_reports` come with the authenticated id of their sender. `mine` is the head of `me`, the peer that asks; both
    are None for a peer that has none. `unheard` is the number of peers that may still answer."""
    seen: dict[bytes, HeadReport] = {}
    reporters: dict[bytes, set[Member]] = {}
    holders: dict[bytes, set[Member]] = {}  # members that report that head or its successor
    starts: dict[bytes, Head] = {}
    answered = set()
    for peer, report, start in _valid(head_reports, authority, genesis):
        head = report.head
        if start is not None:
            starts[start.hash] = start
        answered.add(peer)
        seen.setdefault(head.hash, report)
        reporters.setdefault(head.hash, set()).add(report.member)
        for committed in (head.hash, head.previous):
            holders.setdefault(committed, set()).add(report.member)
    group = max([mine, *starts.values()], key=lambda head: head.term) if mine is not None else genesis
    known = {m.peer for m in group.members} - {me.peer if me is not None else ""}
    own = int(me is not None and group.has(me))
    if group.members and len(known & answered) + unheard + own >= group.quorum:
        enough = max(1, group.quorum - own)
        backers = {name: sum(m.peer in known for m in holders[name]) for name in seen}
        counting = [n for n in seen if n in starts or seen[n].head in (group, genesis) or backers[n] >= enough]
        counting.sort(key=lambda n: seen[n].head.position, reverse=True)
    else:
        backers = {name: sum(s.head.has(member) for member in holders[name]) for name, s in seen.items()}
        signed = [name for name, s in seen.items() if name in starts or s.head == genesis]
        backed = [name for name, s in seen.items() if name in signed or backers[name] >= s.head.quorum]
        counting = [n for n in backed if not unheard or n in signed or 2 * backers[n] > len(answered) + unheard]
        counting.sort(key=lambda n: _rank(seen[n].head, reporters[n], known), reverse=True)
    return [HeadCandidate(seen[n].head, tuple(sorted(m.peer for m in holders[n])), seen[n].regroup) for n in counting]


def majority_speaks(head_reports: Iterable[tuple[str, HeadReport]], authority: str, genesis: Head, head: Head) -> bool:
    """Return whether a majority of the members of `head` has answered, so that `rank_heads` follows that group."""
    answered = {peer for peer, _, _ in _valid(head_reports, authority, genesis)}
    return len(answered & {member.peer for member in head.members}) >= head.quorum


def _valid(
    head_reports: Iterable[tuple[str, HeadReport]], authority: str, genesis: Head
) -> Iterator[tuple[str, HeadReport, Head | None]]:
    """Yield the reports of this run that name their sender and a valid term, with the first head of that term."""
    for peer, report in head_reports:
        head = report.head
        if head.run_id != genesis.run_id or report.member.peer != peer:
            continue
        start = _start_of_term(report, authority)
        if head == genesis or start is not None:
            yield peer, report, start


def _rank(head: Head, reporters: set[Member], known: set[str]) -> tuple[int, int, int, int]:
    """Return the sort key of heads if no majority of a known group has answered."""
    return head.term, sum(m.peer in known for m in reporters), sum(head.has(m) for m in reporters), head.round


def _start_of_term(report: HeadReport, authority: str) -> Head | None:
    """Return the head with which the authority began the term of that report, or None."""
    if report.regroup is None:
        return None
    try:
        start = open_regroup(report.regroup, authority, report.head.run_id)
    except ProtocolViolation:
        return None
    return start if start.term == report.head.term and start.round <= report.head.round else None


async def ask_head_reports(
    rpc: Rpc,
    peers: Iterable[str],
    timeout_s: float = POLL_S,
    group: str = "",
    enough: Callable[[list[tuple[str, HeadReport]], int], bool] = lambda answers, unheard: False,
    most: int = ASKED_MAX,
    gone: set[str] | None = None,
) -> list[tuple[str, HeadReport]]:
    """Ask the first `most` peers at once for their head in `group` (see `AskHead`).

    Peers that do not answer in time, or are in another group, are left out. `enough(answers, unheard)` ends the poll
    early. Peers whose machine refuses the connection are added to `gone`."""
    answers: list[tuple[str, HeadReport]] = []
    asked = list(dict.fromkeys(peers))[:most]
    unheard = len(asked)

    async def ask(peer: str) -> None:
        nonlocal unheard
        try:
            answers.append((peer, (await rpc.call(peer, HEAD_REPORT, AskHead(group), timeout_s=timeout_s)).body))
        except DialError as error:
            if gone is not None and error.reason == "refused":
                gone.add(peer)
            return
        except BarnraiseError:
            return
        finally:
            unheard -= 1
        if enough(answers, unheard):
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for peer in asked:
            nursery.start_soon(ask, peer)
    return answers
