"""The end of a run: no peer is left alone with less than the last round, and the last state is kept.

Joiners and other stages reach the last commit later. If all its holders left, such a peer would continue from an
earlier round, so peers stay until joiners, the other groups and the coordinator have it, for a limited time. The
coordinator has it once the state of every stage is on its disk, from where it serves it after all have left; until then
it publishes the phase `FETCHING` or `WANTING`. The last measurement needs all stages, too: the peer that makes it
publishes the phase `MEASURING`. A peer that comes too late for a state that no peer serves receives that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import trio

from peer.errors import NetworkError, NoQuorum
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.membership.membership import TTL_S, Membership

SERVE_S: Final = 60.0  # after the last commit of its own group a peer serves the others for this long at most
TOO_LATE_S: Final = 60.0  # a peer that has the last commit may come back within this time
LOOK_EVERY_S: Final = 0.5
ARRIVAL_S: Final = 15.0  # a coordinator that is started as this peer is can be found by then
FETCH_S: Final = 3600.0  # while the coordinator fetches the last state, a peer stays for this long at most
MEASURING: Final = "measuring"  # the phase of a peer that has the last commit and has yet to measure the final loss
FETCHING: Final = "fetching the last state"  # the phase of the coordinator
WANTING: Final = "waiting for the last state"  # its phase while no peer serves that, or its disk does not take it
COMPLETE: Final = "complete"  # its phase from then on


async def wait_for_others(membership: Membership[MemberRecord], rounds: int, authority: str) -> None:
    """Stay, with the last commit of this peer's group, while another peer has yet to get its own. `authority`: the
    coordinator, whose fetch of the last state may take longer than others are waited for."""
    await membership.announce()
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            await run_is_over(membership, rounds, trains=True, authority=authority)
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait)
        left_s, until = SERVE_S, trio.current_time() + FETCH_S
        while left_s > 0 and trio.current_time() < until:
            await trio.sleep(LOOK_EVERY_S)
            record = membership.others().get(authority)
            if record is None or record.phase != FETCHING:
                left_s -= LOOK_EVERY_S
        nursery.cancel_scope.cancel()


async def run_is_over(
    membership: Membership[MemberRecord], rounds: int, trains: bool, authority: str | None = None
) -> None:
    """Return when all other peers have the last of `rounds` and none measures any more. `authority`: the coordinator,
    whose record must be read first; for `ARRIVAL_S` at most, since it may be gone permanently.

    `trains`: this peer is a replica and has the last round. A feeder waits for at least one other peer, and until
    one has the last round the regular readings of `membership` are new enough for it. A peer that is missing from a
    reading counts as present while its record may live, unless it has said goodbye: a store that was frozen lacks it.
    """
    read: dict[str, tuple[float, MemberRecord]] = {}  # when each record was first read: an old one expires
    has_left, looked_at = membership.has_left, trio.current_time()
    arrived_by = looked_at + ARRIVAL_S
    while True:
        now, known = trio.current_time(), membership.others()
        if now - looked_at > TTL_S / 2:  # this process stood still: no peer could tell it anything
            read = {peer: (now, record) for peer, (_, record) in read.items()}
        looked_at = now
        for peer, record in known.items():
            if record.role != "feeder" and (peer not in read or read[peer][1] != record):
                read[peer] = (now, record)
        there = [r for peer, (at, r) in read.items() if peer in known or (now - at < TTL_S and not has_left(peer))]
        comes = authority is not None and authority not in read and not has_left(authority) and now < arrived_by
        if rounds and (trains or there) and not comes and all(_is_through(r, rounds, trains) for r in there):
            return
        await trio.sleep(LOOK_EVERY_S)
        if trains or (rounds and any(record.round >= rounds for record in there)):
            with suppress(NetworkError):
                await membership.read()


async def check_run_alive(others: MemberView, authority: str, rounds: int, is_behind: Callable[[], bool]) -> None:
    """Run until cancelled. Raises NoQuorum where the coordinator, the peer `authority`, says that the last of `rounds`
    is committed, this peer has been behind (`is_behind()`) for `TOO_LATE_S`, and neither the coordinator nor any other
    peer had its state meanwhile."""
    since = trio.current_time()
    while True:
        await trio.sleep(LOOK_EVERY_S)
        now, there = trio.current_time(), others()
        over = rounds and authority in there and there[authority].round >= rounds
        held = (r for peer, r in there.items() if peer != authority or r.phase in (COMPLETE, FETCHING))
        passed_on = any(record.round >= rounds for record in held)
        if not over or passed_on or not is_behind():
            since = now
        elif now - since >= TOO_LATE_S:
            raise NoQuorum(
                f"the run is complete, and no peer is left that could pass on its last round, {rounds}: make the model"
                " with `peer export --home` from a peer that took part to the end"
            )


def stages_over(records: Mapping[str, MemberRecord], authority: str, rounds: int) -> bool:
    """Whether all stages have made the last of `rounds`, as the coordinator says: no peer is needed elsewhere."""
    return authority in records and 0 < rounds <= records[authority].round


def _is_through(record: MemberRecord, rounds: int, trains: bool) -> bool:
    """`trains`: as in `run_is_over`. Only replicas can bring the coordinator what it waits for."""
    busy = (MEASURING, FETCHING, WANTING) if trains else (MEASURING,)
    return record.round >= rounds and record.phase not in busy
