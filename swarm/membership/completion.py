"""The end of a run: nobody is left alone with less than its last round.

Joiners and other stages come to the last commit later. Whoever was left behind by all who had it would go on from an
earlier round, so peers stay until joiners, the other groups and the coordinator have it too; but not for ever. The last
measurement needs all stages, too: whoever makes it says so. Whoever comes when all have left is told.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from peer.errors import NetworkError, NoQuorum
from swarm.membership.membership import TTL_S, MemberRecord, Membership, MemberView

PART_S: Final = 60.0  # after its own group's last commit a peer serves the others so long at most
TOO_LATE_S: Final = 60.0  # whoever has the last commit may come back
LOOK_EVERY_S: Final = 0.5
MEASURING: Final = "measuring"  # the phase of who has the last commit, and has yet to measure what the run has learnt


async def wait_for_others(membership: Membership, others: MemberView, rounds: int) -> None:
    """Stay, with the last commit of our own group, while somebody has yet to have its own."""
    await membership.announce()
    with trio.move_on_after(PART_S):
        await run_is_over(membership, others, rounds, trains=True)


async def run_is_over(membership: Membership, others: MemberView, rounds: int, trains: bool) -> None:
    """Until all that are there have seen the last of `rounds`, and nobody measures any more. `trains`: we are a
    replica, which has; else somebody must be there, and until one of them has it there is no hurry: what `membership`
    reads by itself is new enough. Whom a reading lacks is there while its record may live, unless it said goodbye: a
    store that stood still has told nothing of it."""
    read: dict[str, tuple[float, MemberRecord]] = {}  # since when, and for how long: a record that is old expires
    has_left, looked_at = membership.has_left, trio.current_time()
    while True:
        now, known = trio.current_time(), others()
        if now - looked_at > TTL_S / 2:  # we stood still: none of them could tell us that it is there
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


async def check_run_alive(others: MemberView, authority: str, rounds: int, waits: Callable[[], bool]) -> None:
    """For ever. Raises NoQuorum where the coordinator, the peer `authority`, says that the run is complete, and we have
    sat at an earlier round (`waits()`) for `TOO_LATE_S` in which nobody was there who has the last of `rounds`."""
    since = trio.current_time()
    while True:
        await trio.sleep(LOOK_EVERY_S)
        now, there = trio.current_time(), others()
        over = rounds and authority in there and there[authority].round >= rounds
        passed_on = any(record.round >= rounds for peer, record in there.items() if peer != authority)
        if not over or passed_on or not waits():
            since = now
        elif now - since >= TOO_LATE_S:
            raise NoQuorum(
                f"the run is complete, and nobody is there any more who could pass on its last round, {rounds}:"
                " `peer export` makes the model from the --home of whoever took part to the end."
            )


def _is_through(record: MemberRecord, rounds: int) -> bool:
    return record.round >= rounds and record.phase != MEASURING
