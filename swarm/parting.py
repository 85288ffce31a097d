"""The end of a run: nobody is left alone with less than its last round.

Joiners and other stages come to the last commit later. Whoever was left behind by all who had it would go on from an
earlier round, so peers stay until joiners, the other groups and the coordinator have it too; but not for ever.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio

from peer.errors import NetworkError
from swarm.membership import Known, Membership

PART_S: Final = 60.0  # after its own group's last commit a peer serves the others so long at most
LOOK_EVERY_S: Final = 0.5


async def see_off(membership: Membership, others: Known, rounds: int) -> None:
    """Stay, with the last commit of our own group, while somebody has yet to have its own."""
    await membership.announce()
    with trio.move_on_after(PART_S):
        await run_is_over(membership, others, rounds, trains=True)


async def run_is_over(membership: Membership, others: Known, rounds: int, trains: bool) -> None:
    """Until all that are there have seen the last of `rounds`. `trains`: we are a replica, which has; else somebody
    must be there, and until one of them has it there is no hurry: what `membership` reads by itself is new enough."""
    while True:
        there = [record for record in others().values() if record.role != "feeder"]
        if rounds and (trains or there) and all(record.round >= rounds for record in there):
            return
        await trio.sleep(LOOK_EVERY_S)
        if trains or (rounds and any(record.round >= rounds for record in there)):
            with suppress(NetworkError):
                await membership.read()
