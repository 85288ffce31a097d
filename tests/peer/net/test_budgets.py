"""What callers can make a host hold: memory, large headers, calls at once. Where memory is measured, the victim, the
attackers and the honest caller are three processes."""

from __future__ import annotations

import pytest
import trio

from peer.errors import ConnectionLost, RemoteError, RoundDiscarded
from peer.net.admissions import Access
from peer.net.limits import NetLimits
from peer.net.method import Call, Method
from peer.net.wire import HEADER_BYTES, LARGE_HEADER_BYTES
from tests.peer.net.test_rpc import BIG, Number, hosts
from tests.peer.net.test_rpc import Text as Words
from tests.peer.support.attack_child import ATTACKS, begin
from tests.peer.support.honest import TIMED
from tests.peer.support.scene import scene
from tests.peer.support.victim_child import BUDGET, WORDY

LIMITS = NetLimits()
HEADERS = LIMITS.stranger_header_bytes + LIMITS.calls_in_total * 3 // 4 * HEADER_BYTES
"""What strangers may have begun to send: large headers, and a small one for each call that they get."""
ONSET = 25.0  # as slow as quiet calls: while a thousand calls begin at once


@pytest.mark.soak
@pytest.mark.process
async def test_headers_that_never_end() -> None:
    async with scene("guarded") as honest:
        before, quiet = await honest.figures(), await honest.caller.latency()
        for kind in ("small headers", "headers"):
            async with honest.under(kind, 7, 150) as beginning:
                beginning.check_beside(quiet, ONSET)
                await honest.caller.check_beside(quiet)
                await honest.figures()
        assert honest.most - before.resident <= 1.3 * HEADERS  # a call is a task, and a buffer grows ahead


@pytest.mark.process
@TIMED
async def test_replies_that_are_never_read(timed: bool) -> None:
    async with scene("guarded") as honest:
        before, quiet = await honest.figures(), await honest.caller.latency()
        async with honest.under("replies", 7, 150 if timed else 40) as beginning:
            if timed:
                beginning.check_beside(quiet, ONSET)
                await honest.caller.check_beside(quiet)
            await honest.figures()
        assert honest.most - before.resident <= 32 << 20


@pytest.mark.process
@TIMED
async def test_strangers_hold_all_they_can_and_a_member_is_served(timed: bool) -> None:
    """`timed`: at once."""
    async with scene("guarded") as honest:
        before, quiet_s = await honest.figures(), max([await honest.take_s() for _ in range(3)])
        async with honest.under("payloads", 4, 60):
            await honest.figures()
            attacked_s = max([await honest.take_s() for _ in range(3)])
            await honest.figures()
        assert honest.most - before.resident <= 1.1 * BUDGET
        assert not timed or attacked_s <= 2 * max(quiet_s, 0.5)


@pytest.mark.soak
@pytest.mark.process
async def test_payloads_that_trickle_give_way_after_seconds() -> None:
    """At a host of no run, where no peer is trusted."""
    async with scene() as honest:
        await honest.take_s()
        async with honest.under("trickle", 4, 60):
            assert await honest.take_s() < 10


@pytest.mark.process
async def test_a_flood_of_bad_calls_leaves_few_lines() -> None:
    async with scene() as honest:
        async with honest.under("garbage", 4, 48):
            after = await honest.figures()
        assert 4 <= after.penalties <= 20
        assert after.bugs == 0


async def test_calls_at_once_depend_on_what_a_peer_has_proved() -> None:
    limits = NetLimits(calls_in_per_stranger=2, calls_in_per_client=4, calls_in_total=16)
    stall = Method("test/stall", Number, Number, access="open")
    async with hosts(limits) as (a, b, _):
        waiting = 0

        async def hold(call: Call[Number]) -> Number:
            nonlocal waiting
            waiting += 1
            try:
                await trio.sleep_forever()
            finally:
                waiting -= 1
            return call.body

        b.rpc.register(stall, hold)
        b.admissions.guard()
        cases: tuple[tuple[Access, bool, int], ...] = (
            ("open", False, 2),
            ("client", False, 4),
            ("member", False, 12),
            ("member", True, 16),
        )
        for access, trusted, most in cases:
            b.admissions.grant(a.peer_id, access, trusted=trusted)
            async with trio.open_nursery() as nursery:
                for _ in range(most):
                    nursery.start_soon(lambda: a.rpc.call(b.peer_id, stall, Number(1), timeout_s=60))
                with trio.fail_after(300):
                    while waiting < most:
                        await trio.sleep(0.01)
                with pytest.raises(RemoteError, match="too many calls") as caught:
                    await a.rpc.call(b.peer_id, stall, Number(1), timeout_s=60)
                assert caught.value.code == "Busy"
                nursery.cancel_scope.cancel()
            with trio.fail_after(300):
                while waiting:
                    await trio.sleep(0.01)


async def test_large_headers_that_never_end_take_the_memory_of_strangers_alone() -> None:
    """Of a budget for two of them; one that would be the third is refused, but for a trusted peer."""

    async def answer(call: Call[Words]) -> Words:
        return call.body

    wordy = Method(WORDY.name, Words, Words, header_bytes=LARGE_HEADER_BYTES)
    long = Words("x" * (LARGE_HEADER_BYTES // 2))
    async with hosts(NetLimits(stranger_header_bytes=4 * LARGE_HEADER_BYTES)) as (a, b, _):
        b.rpc.register(wordy, answer)
        b.admissions.guard()
        b.admissions.grant(a.peer_id, "member", trusted=False)
        held = b.rpc.server._stranger_headers._held
        streams = [await begin(a, b.peer_id, ATTACKS["headers"]) for _ in range(2)]
        with trio.fail_after(300):
            while sum(held.values()) < 2 * (LARGE_HEADER_BYTES - 1000):
                await trio.lowlevel.checkpoint()
        with pytest.raises(RemoteError, match="too many large requests at once") as caught:
            await a.rpc.call(b.peer_id, wordy, long, timeout_s=60)
        assert caught.value.code == "Busy"
        b.admissions.grant(a.peer_id, "member", trusted=True)
        assert (await a.rpc.call(b.peer_id, wordy, long, timeout_s=60)).body == long
        b.admissions.grant(a.peer_id, "member", trusted=False)
        for stream in streams:
            await stream.reset()
        with trio.fail_after(300):
            while held:
                await trio.lowlevel.checkpoint()
        assert (await a.rpc.call(b.peer_id, wordy, long, timeout_s=60)).body == long


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_check_refuses_a_payload_before_it_is_read(bulk: bool) -> None:
    seen: list[tuple[str, int, int]] = []

    async def check(peer: str, body: Number, size_bytes: int) -> None:
        seen.append((peer, body.value, size_bytes))
        if body.value < 0:
            raise RoundDiscarded("not wanted")

    async def answer(call: Call[Number]) -> Number:
        return call.body

    async with hosts() as (a, b, _):
        checked = Method("test/checked", Number, Number, request_payload_max=BIG)
        b.rpc.register(checked, answer, check)
        payload = bytes(8 << 20)
        with pytest.raises(RemoteError, match="not wanted") as caught:
            await a.rpc.call(b.peer_id, checked, Number(-1), payload, timeout_s=60, bulk=bulk)
        assert caught.value.code == "RoundDiscarded"
        assert not b.rpc.server._budget._held
        assert (await a.rpc.call(b.peer_id, checked, Number(1), payload, timeout_s=60, bulk=bulk)).body == Number(1)
        assert seen == [(a.peer_id, -1, len(payload)), (a.peer_id, 1, len(payload))]


async def test_a_large_header_is_for_admitted_peers_and_methods_that_declare_it() -> None:
    async def answer(call: Call[Words]) -> Words:
        return call.body

    long = Words("x" * (2 * HEADER_BYTES))
    async with hosts() as (a, b, facts):
        for name, header_bytes in (("test/short", HEADER_BYTES), ("test/long", LARGE_HEADER_BYTES)):
            method = Method(name, Words, Words, header_bytes=header_bytes, access="open")
            b.rpc.register(method, answer)
        declared = Method("test/long", Words, Words, header_bytes=LARGE_HEADER_BYTES, access="open")
        assert (await a.rpc.call(b.peer_id, declared, long, timeout_s=60)).body == long
        b.admissions.guard()
        with pytest.raises(RemoteError, match="for peers that are admitted"):
            await a.rpc.call(b.peer_id, declared, long, timeout_s=60)
        b.admissions.grant(a.peer_id, "client", trusted=False)
        assert (await a.rpc.call(b.peer_id, declared, long, timeout_s=60)).body == long
        undeclared = Method("test/short", Words, Words, header_bytes=LARGE_HEADER_BYTES, access="open")
        with pytest.raises(ConnectionLost):
            await a.rpc.call(b.peer_id, undeclared, long, timeout_s=60)
        assert "over the limit of 16384" in str((await facts.wait("peer_penalized")).fields["reason"])
