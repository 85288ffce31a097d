"""Finding out where the run stands: for joiners, for those who woke from a freeze, for those who missed a vote.

No single peer is believed. Whoever knows a group (its own head's members, or those of a later term that the authority
signed) and hears enough of them to make a majority, goes where a majority of them went, and nowhere else. Who knows
nobody, or whose group has dissolved, goes by numbers: a head counts if a majority of its own members has committed it.
What the authority signed counts anyway.
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
ASKED_MAX: Final = 64  # besides the members of a head, whom nobody else may crowd out


@dataclass(frozen=True)
class HeadCandidate:
    """A head that counts, the peers that stand at it or at the next one (these hold its state too), and the authority's
    signature of its term (None in term 0)."""

    head: Head
    holders: tuple[str, ...]
    regroup: Signed | None


@dataclass(frozen=True)
class Viewpoint:
    """Who looks, and from which head."""

    me: Member
    head: Head


def open_regroup(signed: Signed, authority: str, run_id: str) -> Head:
    """The head with which the authority began a term; `ProtocolViolation` if anybody else signed it."""
    head = open_body(signed, REGROUP_KIND, Head, signer=authority)
    if head.run_id != run_id:
        raise ProtocolViolation("a regroup belongs to another run")
    return head


def weigh(
    head_reports: Iterable[tuple[str, HeadReport]],
    authority: str,
    genesis: Head,
    view: Viewpoint | None = None,
    unheard: int = 0,
) -> list[HeadCandidate]:
    """The heads that count, best first. `head_reports`: what each peer said, by authenticated peer id; `unheard`: how
    many may still answer."""
    seen: dict[bytes, HeadReport] = {}
    there: dict[bytes, set[Member]] = {}
    witnesses: dict[bytes, set[Member]] = {}  # who is there, or has gone on from there to the next
    starts: dict[bytes, Head] = {}
    voices = set()
    for peer, report, start in _valid(head_reports, authority, genesis):
        head = report.head
        if start is not None:
            starts[start.hash] = start
        voices.add(peer)
        seen.setdefault(head.hash, report)
        there.setdefault(head.hash, set()).add(report.member)
        for committed in (head.hash, head.previous):
            witnesses.setdefault(committed, set()).add(report.member)
    group = max([view.head, *starts.values()], key=lambda head: head.term) if view else genesis
    known = {m.peer for m in group.members} - {view.me.peer if view else ""}
    mine = int(view is not None and group.has(view.me))
    if group.members and len(known & voices) + unheard + mine >= group.quorum:
        enough = max(1, group.quorum - mine)
        gone = {name: sum(m.peer in known for m in witnesses[name]) for name in seen}
        believed = [n for n in seen if n in starts or seen[n].head in (group, genesis) or gone[n] >= enough]
        believed.sort(key=lambda n: seen[n].head.position, reverse=True)
    else:
        backers = {name: sum(s.head.has(member) for member in witnesses[name]) for name, s in seen.items()}
        signed = [name for name, s in seen.items() if name in starts or s.head == genesis]
        counting = [name for name, s in seen.items() if name in signed or backers[name] >= s.head.quorum]
        believed = [n for n in counting if not unheard or n in signed or 2 * backers[n] > len(voices) + unheard]
        believed.sort(key=lambda n: _weight(seen[n].head, there[n], known), reverse=True)
    return [HeadCandidate(seen[n].head, tuple(sorted(m.peer for m in witnesses[n])), seen[n].regroup) for n in believed]


def majority_speaks(head_reports: Iterable[tuple[str, HeadReport]], authority: str, genesis: Head, head: Head) -> bool:
    """Whether `weigh` goes where the group of `head` went, for who looks from there without a vote; else by numbers."""
    voices = {peer for peer, _, _ in _valid(head_reports, authority, genesis)}
    return len(voices & {member.peer for member in head.members}) >= head.quorum


def _valid(
    head_reports: Iterable[tuple[str, HeadReport]], authority: str, genesis: Head
) -> Iterator[tuple[str, HeadReport, Head | None]]:
    """What is said of this run by whom it is about, with the start of its term."""
    for peer, report in head_reports:
        head = report.head
        if head.run_id != genesis.run_id or report.member.peer != peer:
            continue
        start = _start_of_term(report, authority)
        if head == genesis or start is not None:
            yield peer, report, start


def _weight(head: Head, there: set[Member], known: set[str]) -> tuple[int, int, int, int]:
    """By what heads compare where nobody speaks for a majority."""
    return head.term, sum(m.peer in known for m in there), sum(head.has(m) for m in there), head.round


def _start_of_term(report: HeadReport, authority: str) -> Head | None:
    """The head with which the authority began the term of that standing, if it did."""
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
    """Ask peers, the first `most` of them, where they stand in `group` (see `AskHead`), all at once; those who do not
    answer in time, or before it is `enough` (called with the answers and the number of those still asked), or are in
    another group, are left out. Whose machine says that nobody listens there any more is put into `gone`."""
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
