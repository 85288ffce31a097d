"""What an exchange shows of the links of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from swarm.protocol.shares import rate_of
from swarm.rounds.exchange.link_rates import MEASURED_MIN, LinkRates

ME, PEERS = "me", ("a", "b", "c")
MB = 1_000_000


class Received:
    """A host's counters of what it has read, by peer."""

    peer_id = ME

    def __init__(self) -> None:
        self.read = dict.fromkeys(PEERS, (0, 0.0))

    def received_from(self, peer: str) -> tuple[int, float]:
        return self.read[peer]

    def receive(self, peer: str, size_bytes: int, seconds: float) -> None:
        size, before = self.read[peer]
        self.read[peer] = size + size_bytes, before + seconds


def rates_of(links: LinkRates, peer: str) -> tuple[float, float]:
    up, down = links.codes[peer]
    return rate_of(up) if up else 0.0, rate_of(down) if down else 0.0


async def exchange(links: LinkRates, host: Received, owners: Sequence[str], took_s: dict[str, float]) -> None:
    """Run an exchange in which 3 MB come from each peer within those seconds, and as much goes to each in as many. Each
    sends to all owners at once."""
    links.begin((ME, *PEERS), owners)

    async def deliver(peer: str, seconds: float) -> None:
        for _ in range(3):
            with links.sending(peer, MB, is_result=True) as flows:
                assert flows <= len(PEERS)
                links.receiving(peer, len(PEERS) if peer in owners else len(owners))
                await trio.sleep(seconds / 3)
        host.receive(peer, 3 * MB, seconds)

    async with trio.open_nursery() as nursery:
        for peer, seconds in took_s.items():
            nursery.start_soon(deliver, peer, seconds)
    links.end()


def links_of_a_peer() -> tuple[LinkRates, Received]:
    host: Any = Received()
    return LinkRates(host), host


async def test_a_link_carries_as_many_flows_as_it_has(autojump_clock: trio.testing.MockClock) -> None:
    links, host = links_of_a_peer()
    assert links.codes == {}
    await exchange(links, host, (ME, *PEERS), {"a": 1.0, "b": 1.0, "c": 5.0})
    assert rates_of(links, "a") == (pytest.approx(9 * MB, rel=0.04), 0.0), "three flows of 3 MB/s; no limit is seen"
    assert rates_of(links, "c") == (pytest.approx(1.8 * MB, rel=0.04), pytest.approx(1.8 * MB, rel=0.04))


async def test_a_peer_can_say_no_more_flows_than_it_can_have(autojump_clock: trio.testing.MockClock) -> None:
    links, host = links_of_a_peer()
    links.begin((ME, *PEERS), (ME, "a"))
    for peer, flows in (("a", 1 << 40), ("b", 1 << 40), ("c", 0), ("stranger", 5)):
        links.receiving(peer, flows)
        if peer in PEERS:
            host.receive(peer, 3 * MB, 1.0)
    links.end()
    assert rates_of(links, "a")[0] == pytest.approx(9 * 3 * MB, rel=0.04), "two to each of three, and its results"
    assert rates_of(links, "b")[0] == pytest.approx(6 * 3 * MB, rel=0.04)
    assert rates_of(links, "c")[0] == pytest.approx(3 * MB, rel=0.04)


async def test_only_results_measure_what_a_link_takes(autojump_clock: trio.testing.MockClock) -> None:
    """A peer sends its update to some owners at a time, its results to all."""
    links, _ = links_of_a_peer()
    links.begin((ME, *PEERS), PEERS)
    for peer, seconds in (("a", 1.0), ("b", 1.0), ("c", 9.0)):
        with links.sending(peer, MB, is_result=False):
            await trio.sleep(seconds)
    links.end()
    assert links.codes == {}


async def test_who_owns_nothing_sends_to_owners_alone(autojump_clock: trio.testing.MockClock) -> None:
    links, host = links_of_a_peer()
    await exchange(links, host, (ME, "a"), {"a": 1.0, "b": 1.0, "c": 5.0})
    assert rates_of(links, "a")[0] == pytest.approx(9 * MB, rel=0.04)
    assert rates_of(links, "b")[0] == pytest.approx(6 * MB, rel=0.04)
    assert rates_of(links, "c")[1] == pytest.approx(1.2 * MB, rel=0.04)


async def test_later_exchanges_count_more(autojump_clock: trio.testing.MockClock) -> None:
    links, host = links_of_a_peer()
    await exchange(links, host, PEERS, dict.fromkeys(PEERS, 1.0) | {"c": 4.0})
    await exchange(links, host, PEERS, dict.fromkeys(PEERS, 1.0))
    assert rates_of(links, "c") == (pytest.approx(4.5 * MB, rel=0.05), 0.0), "the geometric mean; its limit is gone"
    for _ in range(4):
        await exchange(links, host, PEERS, dict.fromkeys(PEERS, 1.0))
    assert rates_of(links, "c")[0] == pytest.approx(9 * MB, rel=0.1)


async def test_little_and_nothing_measure_nothing(autojump_clock: trio.testing.MockClock) -> None:
    links, host = links_of_a_peer()
    links.begin((ME, *PEERS), PEERS)
    with links.sending("a", MEASURED_MIN - 1, is_result=True):
        await trio.sleep(1.0)
    with pytest.raises(ValueError, match="refused"), links.sending("b", 10 * MB, is_result=True):
        await trio.sleep(1.0)
        raise ValueError("refused")
    host.receive("a", MEASURED_MIN - 1, 1.0)
    links.end()
    assert links.codes == {}
    await exchange(links, host, PEERS, dict.fromkeys(PEERS, 1.0))
    before = links.codes
    links.end()
    assert links.codes == before, "each exchange counts once"
    links.begin((ME, "a"), ("a",))
    links.end()
    assert set(links.codes) == {"a"}, "who has left is forgotten"
