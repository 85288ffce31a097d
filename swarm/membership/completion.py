"""The end of a run: no peer is left alone with less than the last round.

Joiners and other stages reach the last commit later. A peer that all holders of it had left would go on from an earlier
round, so peers stay until joiners, the other groups and the coordinator have it, for a limited time. The last
measurement needs all stages, too: the peer that makes it publishes the phase `MEASURING`. A peer that comes after all
have left is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from peer.errors import NetworkError, NoQuorum
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.membership.membership import TTL_S, Membership

SERVE_S: Final = 60.0  # after the last commit of its own group a peer serves the others for this long at most
TOO_LATE_S: Final = 60.0  # a peer that has the last commit may come back within this time
LOOK_EVERY_S: Final = 0.5
MEASURING: Final = "measuring"  # the phase of a peer that has the last commit and has yet to measure the final loss


async def wait_for_others(membership: Membership[MemberRecord], rounds: int) -> None:
    """Stay, with the last commit of this peer's group, while another peer has yet to get its own."""
    await membership.announce()
    with trio.move_on_after(SERVE_S):
        await run_is_over(membership, rounds, trains=True)


async def run_is_over(membership: Membership[MemberRecord], rounds: int, trains: bool) -> None:
    """Return when all other peers have the last of `rounds` and none measures any more.

    `trains`: this peer is a replica and has the last round. A feeder waits until at least one other peer is there, and
    until one has the last round the regular readings of `membership` are new enough for it. A peer that is missing from
    a reading counts as there while its record may live, unless it has said goodbye: a store that stood still lacks it.
    """
    read: dict[str, tuple[float, MemberRecord]] = {}  # when each record was first read: an old one expires
    has_left, looked_at = membership.has_left, trio.current_time()
    while True:
        now, known = trio.current_time(), membership.others()
        if now - looked_at > TTL_S / 2:  # this process stood still: no peer could tell it anything
            read = {peer: (now, record) for peer, (_, record) in read.items()}
        looked_at = now
        for peer, record in known.items():
            if record.role != "feeder" and (peer not in read or read[peer][1] != record):
                read[peer] = (now, record)
        there = [r for peer, (at, r) in read.items() if peer in known or (now - at < TTL_S and not has_left(peer))]
        if rounds and (trains or there) and all(_is_through(record, rounds) for record in there):
            return
        await trio.sleep(LOOK_EVERY_S)
        if trains or (rounds and any(record.round >= rounds for record in there)):
            with suppress(NetworkError):
                await membership.read()


async def check_run_alive(others: MemberView, authority: str, rounds: int, is_behind: Callable[[], bool]) -> None:
    """Run until cancelled. Raises NoQuorum where the coordinator, the peer `authority`, says that the run is complete,
    this peer has been behind (`is_behind()`) for `TOO_LATE_S`, and no other peer had the last of `rounds` meanwhile."""
    since = trio.current_time()
    while True:
        await trio.sleep(LOOK_EVERY_S)
        now, there = trio.current_time(), others()
        over = rounds and authority in there and there[authority].round >= rounds
        passed_on = any(record.round >= rounds for peer, record in there.items() if peer != authority)
        if not over or passed_on or not is_behind():
            since = now
        elif now - since >= TOO_LATE_S:
            raise NoQuorum(
                f"the run is complete, and no peer is left that could pass on its last round, {rounds}: make the model"
                " with `peer export --home` from a peer that took part to the end"
            )


def _is_through(record: MemberRecord, rounds: int) -> bool:
    return record.round >= rounds and record.phase != MEASURING
