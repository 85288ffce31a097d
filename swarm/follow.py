"""Finding out where the run stands: for joiners, for those who woke from a freeze, for those who missed a vote.

No single peer is believed. A head counts if a majority of its own members stand at it or have just gone on from it, or
if the authority signed it; among those, the latest term wins, then the one that most of its members stand at, then the
later round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from peer.errors import BarnraiseError, ProtocolViolation
from peer.identity import Signed, open_body
from peer.rpc import Rpc
from swarm.chain import Head
from swarm.messages import REGROUP_KIND, STANDING, AskHead, Standing

POLL_S: Final = 4.0
ASKED_MAX: Final = 64


@dataclass(frozen=True)
class Sighting:
    """A head that counts, the peers that stand at it or at the next one (these hold its state too), and the authority's
    signature of its term (None in term 0)."""

    head: Head
    holders: tuple[str, ...]
    regroup: Signed | None


def open_regroup(signed: Signed, authority: str, run_id: str) -> Head:
    """The head with which the authority began a term; `ProtocolViolation` if anybody else signed it."""
    head = open_body(signed, REGROUP_KIND, Head, signer=authority)
    if head.run_id != run_id:
        raise ProtocolViolation("a regroup belongs to another run")
    return head


def weigh(standings: Iterable[tuple[str, Standing]], authority: str, genesis: Head) -> list[Sighting]:
    """The heads that count, best first. `standings`: what each peer said, by authenticated peer id."""
    holders: dict[bytes, list[str]] = {}
    backers: dict[bytes, int] = {}
    gone_on: dict[bytes, list[tuple[str, Standing]]] = {}
    seen: dict[bytes, Standing] = {}
    signed_heads: set[bytes] = set()
    for peer, standing in standings:
        head = standing.head
        if head.run_id != genesis.run_id or standing.member.peer != peer:
            continue
        if head != genesis and not _term_is_signed(standing, authority, signed_heads):
            continue
        name = head.hash
        seen.setdefault(name, standing)
        holders.setdefault(name, []).append(peer)
        backers[name] = backers.get(name, 0) + head.has(standing.member)
        gone_on.setdefault(head.previous, []).append((peer, standing))
    counting = []
    for name, standing in seen.items():
        after = gone_on.get(name, [])
        backed = backers[name] + sum(standing.head.has(s.member) for _, s in after)
        if standing.head == genesis or name in signed_heads or backed >= standing.head.quorum:
            counting.append(name)
            holders[name] += [peer for peer, _ in after]
    counting.sort(key=lambda n: (seen[n].head.term, backers[n], seen[n].head.round), reverse=True)
    return [Sighting(seen[n].head, tuple(holders[n]), seen[n].regroup) for n in counting]


def _term_is_signed(standing: Standing, authority: str, signed_heads: set[bytes]) -> bool:
    if standing.regroup is None:
        return False
    try:
        start = open_regroup(standing.regroup, authority, standing.head.run_id)
    except ProtocolViolation:
        return False
    if start.term != standing.head.term or start.round > standing.head.round:
        return False
    if start == standing.head:
        signed_heads.add(start.hash)
    return True


async def ask_standings(
    rpc: Rpc,
    peers: Iterable[str],
    timeout_s: float = POLL_S,
    enough: Callable[[list[tuple[str, Standing]]], bool] = lambda answers: False,
) -> list[tuple[str, Standing]]:
    """Ask peers where they stand, all at once; those who do not answer in time, or before it is `enough`, are left
    out."""
    answers: list[tuple[str, Standing]] = []

    async def ask(peer: str) -> None:
        try:
            reply = await rpc.call(peer, STANDING, AskHead(), timeout_s=timeout_s)
        except BarnraiseError:
            return
        answers.append((peer, reply.body))
        if enough(answers):
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for peer in list(dict.fromkeys(peers))[:ASKED_MAX]:
            nursery.start_soon(ask, peer)
    return answers
