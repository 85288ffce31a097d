"""Helpers of the authority's tests: an authority, and one peer that is left of its group."""

from __future__ import annotations

from collections.abc import Callable

import trio

from peer.events import EventLog
from peer.identity import Identity, Signed, sign_body
from peer.net.host import HostConfig, open_host
from swarm.coordinator.authority import Authority
from swarm.coordinator.durable_state import DurableState, SeenHead
from swarm.coordinator.handlers import CoordinatorHandlers
from swarm.coordinator.rules import GroupRules, RegroupTimeouts
from swarm.coordinator.run_progress import RunProgress
from swarm.protocol import messages as say
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.messages import REGROUP_KIND
from swarm.protocol.quorum import open_regroup

FIRST = genesis("run", b"0" * 32)
MAX_PEERS = 3
CROWD = "198.51.100.0/24"  # the address prefix of all peers of a crowd
NEVER_S = 2.0  # many times as long as a regroup takes with the timeouts below
QUICK = RegroupTimeouts(poll_s=0.1, gone_s=0.2, lost_s=0.4, join_request_s=600.0)


async def regrouped_by(
    durable: DurableState,
    report: say.HeadReport,
    me: Identity,
    stranger: Identity,
    seen_before: tuple[Head, ...] = (),
    rounds: int = 0,
    *,
    stage: int | None = None,
    timeouts: RegroupTimeouts = QUICK,
    others: tuple[Head, ...] = (),
    crowd: tuple[Member, ...] = (),
    per_prefix: int = MAX_PEERS,
    within_s: float = 60.0,
    until: Callable[[], bool] | None = None,
) -> Head | None:
    """Return what an authority signs when only one peer, at the head of `report`, is alive and asks to join.

    The authority has just seen `seen_before`, then the last head of `durable`. The other groups are at `others`. The
    peers of `crowd` publish records, and ask to join at the same head. Waits for the signature, or for `until`.
    """
    before = durable.signed
    async with (
        open_host(HostConfig(identity=me, events=EventLog())) as host,
        open_host(HostConfig(identity=stranger, events=EventLog())) as other,
        trio.open_nursery() as nursery,
    ):
        progress = RunProgress()
        for head in others:
            Authority(host, GroupRules(genesis=head, rounds=rounds), DurableState(), list, progress)._note_completion()
        known = [*(member.peer for member in crowd), stranger.peer_id]
        rules = GroupRules(
            genesis=FIRST, stage=stage, rounds=rounds, max_peers=MAX_PEERS, members_per_prefix=per_prefix
        )
        authority = Authority(host, rules, durable, lambda: known, progress, timeouts)
        for member in crowd:
            authority.request_join(say.JoinRequest(report.head.hash, report.head.round, member, (), "run"), CROWD)
        for head in (*seen_before, authority.head):
            authority._see(head)
        CoordinatorHandlers(host, [authority])
        told = trio.Event()

        async def answer(call: object) -> say.HeadReport:
            return report

        async def regroup(call: object) -> say.HeadReport:
            told.set()
            return report

        other.rpc.register(say.HEAD_REPORT, answer)  # type: ignore[arg-type]
        other.rpc.register(say.REGROUP, regroup)  # type: ignore[arg-type]
        await host.connect_address(other.addresses[0], timeout_s=30)
        nursery.start_soon(authority.run)
        with trio.move_on_after(within_s):
            if until is None:
                await told.wait()
            while until is not None and not until():
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    signed = durable.signed
    return None if signed is None or signed == before else open_regroup(signed, me.peer_id, "run")


def begun(me: Identity, members: tuple[Member, ...]) -> tuple[Head, Signed]:
    head = FIRST.regrouped(members, 1)
    return head, sign_body(me, REGROUP_KIND, head)


def after(head: Head, signed: Signed) -> DurableState:
    """What an authority remembers that saw that head last, and none before it."""
    return DurableState(signed, SeenHead(head))


def some_members(number: int) -> list[Member]:
    return [Member(Identity.generate().peer_id, "s") for _ in range(number)]


def first_of(group: str) -> Head:
    return genesis(group, group.encode().ljust(32, b"."))
