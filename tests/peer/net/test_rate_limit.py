from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from peer.net.rate_limit import Meter, TokenBucket


async def test_the_cap_holds_on_average(autojump_clock: MockClock) -> None:
    bucket = TokenBucket(1000.0)
    started = trio.current_time()
    for _ in range(50):
        await bucket.take(100)
    assert 4.5 <= trio.current_time() - started <= 5.0  # 5000 bytes, less the burst at the start and the last piece


async def test_no_cap_never_waits(autojump_clock: MockClock) -> None:
    bucket = TokenBucket(None)
    started = trio.current_time()
    for _ in range(1000):
        await bucket.take(1 << 30)
    assert trio.current_time() == started
    assert bucket.piece_bytes(1 << 20) == 1 << 20


async def test_control_frames_never_wait_but_count(autojump_clock: MockClock) -> None:
    bucket = TokenBucket(1000.0)
    started = trio.current_time()
    for _ in range(20):
        bucket.charge(100)
    assert trio.current_time() == started
    await bucket.take(1)
    assert trio.current_time() - started == pytest.approx(1.75)  # a debt of 2000 bytes less a burst of 250


async def test_takers_are_served_in_order(autojump_clock: MockClock) -> None:
    bucket = TokenBucket(1000.0)
    served: list[int] = []

    async def taker(number: int) -> None:
        await trio.sleep(number / 1e6)
        await bucket.take(500)
        served.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(taker, number)
    assert served == list(range(6))


def test_a_slow_cap_is_taken_in_small_pieces() -> None:
    assert TokenBucket(100_000.0, clock=lambda: 0.0).piece_bytes(1 << 20) == 25_000


async def test_the_meter_counts() -> None:
    meter = Meter(TokenBucket(None), TokenBucket(None))
    meter.sent("a", 10)
    meter.received("a", 20)
    meter.received("b", 5)
    assert (meter.bytes_up, meter.bytes_down) == (10, 25)
    assert meter.by_peer["a"].bytes_down == 20
    meter.read("a", 1000, 0.5)
    meter.read("a", 2000, 0.25)
    assert (meter.by_peer["a"].payload_bytes, meter.by_peer["a"].payload_s) == (3000, 0.75)


async def test_the_meter_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.rate_limit._PEERS_MAX", 3)
    meter = Meter(TokenBucket(None), TokenBucket(None))
    for number in range(10):
        meter.received(str(number), 1)
    assert len(meter.by_peer) == 3 and "9" in meter.by_peer and meter.bytes_down == 10


async def test_the_meter_forgets_strangers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.rate_limit._PEERS_MAX", 3)
    meter = Meter(TokenBucket(None), TokenBucket(None), lambda peer: peer == "member")
    meter.received("member", 7)
    for number in range(10):
        meter.received(str(number), 1)
    assert len(meter.by_peer) == 3 and meter.by_peer["member"].bytes_down == 7
