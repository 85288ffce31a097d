from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from libp2p.peer.id import ID

from peer.errors import ConnectionLost, DeadlineExceeded, NetworkError, RemoteError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.heartbeat import PING, LagMeter
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from peer.net.method import Call, Empty
from tests.peer.net.test_rpc import Facts
from tests.peer.support.host_child import ECHO, STALL, Number
from tests.support.forking.children import open_child
from tests.support.ports import free_port

pytestmark = pytest.mark.process
QUICK = NetLimits(ping_interval_s=0.5, suspect_after_s=2.0)


class Child:
    """A host in a process of its own."""

    def __init__(self, pid: int, address: str) -> None:
        self._pid = pid
        self.address = address
        self.peer_id = address.rpartition("/")[2]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)


@asynccontextmanager
async def child(listen: str = "/ip4/127.0.0.1/tcp/0", seed: str = "") -> AsyncIterator[Child]:
    async with open_child("tests.peer.support.host_child", listen, *([seed] if seed else [])) as process:
        yield Child(process.pid, await process.line())


@asynccontextmanager
async def watching(target: Child, limits: NetLimits = QUICK) -> AsyncIterator[tuple[Host, Facts]]:
    log = EventLog()
    facts = Facts(log)
    async with open_host(identity=Identity.generate(), events=log, limits=limits) as host:
        await host.connect_address(target.address, timeout_s=60)
        host.watch([target.peer_id])
        yield host, facts


async def test_a_killed_peer_is_suspect_at_once_and_calls_to_it_end() -> None:
    limits = NetLimits(suspect_after_s=600.0)  # silence alone makes no peer suspect here
    async with child() as target, watching(target, limits) as (host, facts):
        failed: list[BaseException] = []

        async def stalled() -> None:
            try:
                await host.rpc.call(target.peer_id, STALL, Number(1), timeout_s=600)
            except NetworkError as error:
                failed.append(error)

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stalled)
                await host.rpc.call(target.peer_id, ECHO, Number(1), timeout_s=60)
                target.signal(signal.SIGKILL)
                await host.wait_suspect(target.peer_id)
        assert host.suspects == {target.peer_id}
        assert isinstance(failed[0], ConnectionLost)
        assert (await facts.wait("peer_suspect")).fields["peer"] == target.peer_id


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_frozen_peer_is_suspect_in_time_and_recovers(bulk: bool) -> None:
    async with child() as target, watching(target) as (host, facts):
        host.watch([])  # on a busy machine the child may stand still
        await host.rpc.call(target.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=60, bulk=bulk)
        host.watch([target.peer_id])
        target.signal(signal.SIGSTOP)
        with trio.fail_after(300):
            with pytest.raises(NetworkError):  # a frozen receiver must not freeze the sender
                await host.rpc.call(target.peer_id, ECHO, Number(1), bytes(200 << 20), timeout_s=600, bulk=bulk)
            await host.wait_suspect(target.peer_id)
            target.signal(signal.SIGCONT)
            await facts.wait("peer_recovered")
            assert host.suspects == frozenset()
            host.watch([])
            reply = await host.rpc.call(target.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=60, bulk=bulk)
        assert reply.body == Number(2)


async def test_a_peer_that_is_too_busy_to_answer_is_alive() -> None:
    limits = NetLimits(calls_in_total=3)
    async with (
        open_host(identity=Identity.generate(), events=EventLog(), limits=limits) as busy,
        open_host(identity=Identity.generate(), events=EventLog()) as crowd,
        open_host(identity=Identity.generate(), events=EventLog()) as host,
    ):
        taken = trio.Semaphore(0)

        async def stall(call: Call[Number]) -> Number:
            taken.release()
            await trio.sleep_forever()
            return call.body

        busy.rpc.register(STALL, stall)
        for other in (crowd, host):
            await other.connect_address(busy.addresses[0], timeout_s=60)
        async with trio.open_nursery() as nursery:
            for _ in range(limits.calls_in_total):
                nursery.start_soon(lambda: crowd.rpc.call(busy.peer_id, STALL, Number(1), timeout_s=600))
            with trio.fail_after(300):
                for _ in range(limits.calls_in_total):
                    await taken.acquire()
                with pytest.raises(RemoteError, match="too many calls"):
                    await host.rpc.call(busy.peer_id, ECHO, Number(1), timeout_s=60)
                assert await host._heartbeat._answers(busy.peer_id)
            nursery.cancel_scope.cancel()


async def test_a_ping_does_not_wait_for_other_calls() -> None:
    limits = NetLimits(calls_out_per_peer=1)
    async with child() as target, watching(target, limits) as (host, _), trio.open_nursery() as nursery:
        host.watch([])
        nursery.start_soon(lambda: host.rpc.call(target.peer_id, STALL, Number(1), timeout_s=600))
        with trio.fail_after(300):
            while target.peer_id not in host.rpc._slots:
                await trio.lowlevel.checkpoint()
            await host.rpc.call(target.peer_id, PING, Empty(), timeout_s=600)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("bulk", [False, True])
async def test_calls_to_an_unwatched_frozen_peer_end_by_their_deadline(bulk: bool) -> None:
    async with child() as target, watching(target) as (host, _):
        host.watch([])
        await host.rpc.call(target.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=60, bulk=bulk)
        target.signal(signal.SIGSTOP)
        for size in (0, 100 << 20):
            with trio.fail_after(300), pytest.raises(DeadlineExceeded):
                await host.rpc.call(target.peer_id, ECHO, Number(1), bytes(size), timeout_s=1, bulk=bulk)
        target.signal(signal.SIGCONT)
        await host.rpc.call(target.peer_id, ECHO, Number(1), timeout_s=60)


async def test_a_peer_that_restarts_recovers() -> None:
    seed = os.urandom(32)
    own = f"/ip4/127.0.0.1/tcp/{free_port()}"  # no other process gets it while the peer is down
    async with child(own, seed.hex()) as target, watching(target) as (host, facts):
        listen = target.address.partition("/p2p/")[0]
        target.signal(signal.SIGKILL)
        with trio.fail_after(300):
            await host.wait_suspect(target.peer_id)
            async with child(listen, seed.hex()) as again:
                assert again.peer_id == target.peer_id
                await facts.wait("peer_recovered")


async def test_a_lost_connection_to_a_living_peer_is_redialled_without_suspicion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A child that stands still for seconds on a busy machine must not matter here.
    monkeypatch.setattr("peer.net.heartbeat._REDIAL_S", 60.0)
    limits = NetLimits(suspect_after_s=60.0, dial_timeout_s=60.0)
    async with child() as target, watching(target, limits) as (host, facts):
        for _ in range(3):
            for connection in host.libp2p.get_network().get_connections(ID.from_base58(target.peer_id)):
                await connection.close()
            await host.rpc.call(target.peer_id, ECHO, Number(1), timeout_s=60)
        assert not [event for event in facts if event.name == "peer_suspect"]


async def test_our_own_standstill_is_not_the_peers_silence() -> None:
    limits = NetLimits(ping_interval_s=0.5, suspect_after_s=6.0)  # the child may stand still for seconds too
    async with child() as target, watching(target, limits) as (host, facts):
        await host.rpc.call(target.peer_id, ECHO, Number(1), timeout_s=60)
        pauses = [2.5] * 4  # our loop stands still for much longer than suspect_after_s
        for pause in pauses:
            block(pause)
            await trio.lowlevel.checkpoint()
        await host.rpc.call(target.peer_id, ECHO, Number(1), timeout_s=60)
        assert not [event for event in facts if event.name == "peer_suspect"]


async def test_our_own_standstill_during_a_redial_is_not_the_peers_silence() -> None:
    log = EventLog()
    async with open_host(identity=Identity.generate(), events=log) as host:
        heartbeat = host._heartbeat
        slept: list[float] = []
        lost: list[ConnectionLost] = []

        async def call(*_: object, timeout_s: float) -> None:
            if lost:
                raise lost.pop()
            if not slept:
                return
            heartbeat._lag._lost += slept.pop(0)
            raise DeadlineExceeded("it did not answer.")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heartbeat._rpc, "call", call)
            for sleeps, answers in (([10.0, 10.0], True), ([10.0, 0.0], False)):
                slept += sleeps
                lost.append(ConnectionLost("the connection ended"))
                assert await heartbeat._answers("a peer") is answers and not slept and not lost


def block(seconds: float) -> None:
    """Stand still, as a starved or stopped process does."""
    subprocess.run(["sleep", str(seconds)], check=True)


async def test_the_lag_meter_measures_a_stopped_loop() -> None:
    async with trio.open_nursery() as nursery:
        lag = LagMeter()
        nursery.start_soon(lag.run)
        await trio.testing.wait_all_tasks_blocked()
        while lag.stood_still_until > trio.current_time() - 0.1:  # on a busy machine it may have done so already
            await trio.sleep(0.05)
        before, began = lag.lost_s, trio.current_time()
        assert lag.stood_still_until < began
        block(0.9)
        assert lag.lost_s - before > 0.6 and lag.stood_still_until > began, "also before it has run again"
        while lag.stood_still_until > (now := trio.current_time()) - 0.1:
            await trio.sleep(0.05)
        assert began < lag.stood_still_until < now
        nursery.cancel_scope.cancel()


async def test_unwatched_peers_are_no_suspects() -> None:
    async with child() as target, watching(target) as (host, _):
        target.signal(signal.SIGKILL)
        with trio.fail_after(300):
            await host.wait_suspect(target.peer_id)
        host.watch([])
        assert host.suspects == frozenset()


async def test_a_host_that_has_ended_starts_no_watch() -> None:
    """A run that acts for a moment longer asked it to: that ended in a traceback."""
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        pass
    host.watch([Identity.generate().peer_id], cause="late")
