"""The plans of the topology benchmark: their bytes, their sums, and the time that links take for them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.common import shaped_lan
from benchmarks.rounds.topologies import links_of, summary, weights_for
from benchmarks.rounds.topology_plans import (
    TOPOLOGIES,
    VALUE_BYTES,
    PartialSum,
    Plan,
    Transfer,
    formula,
    plan_of,
    total,
    traffic,
)
from benchmarks.rounds.topology_rows import FORMULAS, section
from benchmarks.rounds.topology_simulation import fair_rates, simulated_s
from swarm.protocol.shares import LinkSpeed

EACH = 2  # slices
WEIGHTS = (255, 255, 200, 3, 0)


def weights_to(peers: int) -> tuple[int, ...]:
    return tuple(WEIGHTS[peer % len(WEIGHTS)] for peer in range(peers))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_plan_has_the_bytes_of_the_formula(topology: str) -> None:
    for peers in (*range(2, 18), 24, 33, 64):
        values = 5040 * peers
        plan = plan_of(topology, peers, values, weights_to(peers), EACH)
        stated = formula(topology, peers, values * VALUE_BYTES, weights_to(peers), EACH)
        rounding = VALUE_BYTES * 2 * EACH * peers  # of the ends of slices
        for found in traffic(plan, peers):
            assert found == pytest.approx(stated, abs=rounding), peers
        assert sum(stated) == pytest.approx(total(topology, peers, values * VALUE_BYTES))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("peers", [2, 3, 4, 5, 7, 8, 12, 16, 33])
def test_every_peer_has_the_sum_at_the_end(topology: str, peers: int) -> None:
    random = np.random.default_rng(peers)
    vectors = [random.integers(0, 1 << 32, 997, dtype=np.uint32) for _ in range(peers)]
    plan = plan_of(topology, peers, 997, weights_to(peers))
    for seed in range(2):
        for found in carried_out(plan, vectors, Random(seed)):
            assert (found == np.sum(vectors, axis=0, dtype=np.uint32)).all()


def any_of(pool: list[Any], random: Random) -> Any:
    """Remove any one and return it."""
    place = random.randrange(len(pool))
    pool[place], pool[-1] = pool[-1], pool[place]
    return pool.pop()


def carried_out(plan: Plan, vectors: Sequence[np.ndarray], random: Random) -> list[np.ndarray]:
    """Return what the peers have after a plan whose transfers arrive in any order that it allows."""
    peers = [PartialSum(vector) for vector in vectors]
    waits_for = [len(transfer.after) for transfer in plan]
    unlocks: list[list[int]] = [[] for _ in plan]
    for index, transfer in enumerate(plan):
        assert all(plan[before].receiver == transfer.sender for before in transfer.after)
        for before in transfer.after:
            unlocks[before].append(index)
    ready = [index for index, count in enumerate(waits_for) if not count]
    sent: list[tuple[int, np.ndarray]] = []
    arrived = 0
    while ready or sent:
        if ready and (not sent or random.random() < 0.5):
            index = any_of(ready, random)
            sent.append((index, peers[plan[index].sender].content(plan[index]).copy()))
            continue
        index, content = any_of(sent, random)
        peers[plan[index].receiver].arrive(plan[index], content)
        arrived += 1
        for after in unlocks[index]:
            waits_for[after] -= 1
            if not waits_for[after]:
                ready.append(after)
    assert arrived == len(plan)
    return [peer.values for peer in peers]


# -- time --------------------------------------------------------------------------------------------------------------


def rates(flows: Sequence[tuple[int, int]], up: Sequence[float], down: Sequence[float]) -> list[float]:
    senders, receivers = np.array(flows).T
    return list(fair_rates(senders, receivers, np.array(up, float), np.array(down, float)))


@pytest.mark.parametrize(
    ("flows", "up", "down", "expected"),
    [
        ([(0, 1)], [8, 8], [8, 3], [3]),
        ([(0, 1), (0, 2)], [8, 8, 8], [8, 8, 8], [4, 4]),
        ([(0, 1), (0, 2)], [8, 8, 8], [8, 2, 8], [2, 6]),  # what the slow receiver leaves is the other's
        ([(0, 2), (1, 2), (1, 0)], [8, 8, 8], [9, 9, 4], [2, 2, 6]),
        ([(0, 1), (1, 0)], [8, 8], [8, 8], [8, 8]),  # up and down apart
    ],
)
def test_flows_share_links_fairly(
    flows: list[tuple[int, int]], up: list[float], down: list[float], expected: list[float]
) -> None:
    assert rates(flows, up, down) == pytest.approx(expected)


def test_a_transfer_waits_for_those_before_it_and_for_its_turn() -> None:
    """Two of 400 bytes from 0 to 1 one after the other; the answer to the first goes back beside the second."""
    plan = [Transfer(0, 1, 0, 100, True), Transfer(0, 1, 0, 100, True), Transfer(1, 0, 0, 200, False, [0])]
    links = [LinkSpeed(100, 100), LinkSpeed(100, 100)]
    assert simulated_s(plan[:2], links) == pytest.approx(8)
    assert simulated_s(plan, links) == pytest.approx(4 + 8)
    assert simulated_s(plan, links, delay_s=1) == pytest.approx(4 + 1 + 8 + 1)
    assert simulated_s(plan[:2], [LinkSpeed(400, 100), LinkSpeed(100, 50)]) == pytest.approx(16)


def test_a_flow_that_ends_leaves_its_rate_to_the_others() -> None:
    plan = [Transfer(0, 1, 0, 100, True), Transfer(0, 2, 0, 200, True)]
    assert simulated_s(plan, [LinkSpeed(100, 100)] * 3) == pytest.approx(8 + 4)


@pytest.mark.parametrize("peers", [2, 4, 8, 16])
def test_on_even_links_the_busiest_link_is_the_limit(peers: int) -> None:
    links, values = links_of("even", peers, 8), 1024 * 15
    size_s = values * VALUE_BYTES / 1e6
    took = {topology: simulated_s(plan_of(topology, peers, values), links) for topology in TOPOLOGIES}
    share = 2 * (peers - 1) / peers * size_s
    assert took["ring"] == pytest.approx(share) == took["halving"]
    assert took["naive"] == pytest.approx((peers - 1) * size_s)
    for topology, least in (("butterfly", share), ("by link", share), ("server", (peers - 1) * size_s)):
        assert least * 0.999 < took[topology] < least * 1.2, "the first slice and the last have the link alone"


def test_shares_by_link_pay_where_one_link_is_slow() -> None:
    links, values = links_of("uneven", 8, 100), 1_000_000
    weights = weights_for("by link", links, values * VALUE_BYTES)
    assert weights[-1] < min(weights[:-1])
    assert weights_for("by link", links_of("even", 8, 100), values * VALUE_BYTES) == ()
    assert weights_for("butterfly", links, values * VALUE_BYTES) == ()
    equal, shared = (simulated_s(plan_of("by link", 8, values, each), links) for each in ((), weights))
    slow_s = values * VALUE_BYTES / links[-1].up
    assert equal == pytest.approx(1.75 * slow_s, rel=0.05)
    assert slow_s < shared < 1.25 * slow_s


# -- the network and the page ------------------------------------------------------------------------------------------


def test_each_host_has_its_own_rates_up_and_down(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    monkeypatch.setattr(shaped_lan, "_call", lambda command: commands.append(" ".join(command)))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(" ".join(command)))
    shaped_lan.Lan(2, [(100.0, 100.0), (20.0, 50.0)]).build()
    shaped_lan.Lan(1, 7.5).build()
    shaped = [command.split(" qdisc add dev ")[1].split(" burst")[0] for command in commands if "qdisc" in command]
    assert shaped == [
        *("wan root tbf rate 100.0mbit", "to-0 root tbf rate 100.0mbit"),
        *("wan root tbf rate 20.0mbit", "to-1 root tbf rate 50.0mbit"),
        *("wan root tbf rate 7.5mbit", "to-0 root tbf rate 7.5mbit"),
    ]
    with pytest.raises(ValueError, match="1 rates for 2 hosts"):
        shaped_lan.Lan(2, [(100.0, 100.0)])


def test_the_page_marks_bytes_off_the_formula_and_wrong_sums() -> None:
    runs = [{"up": [1010, 1000], "down": [1000, 1040], "seconds": s, "exact": s < 3} for s in (1.0, 2.0, 3.0)]
    row = summary("ring", runs, 1000, ())
    assert row["off"] == pytest.approx(0.04) and row["seconds"] == 2.0 and not row["exact"]
    assert (row["total_bytes"], row["total_formula"], row["busiest_down"]) == (2010, 2000, 1040)
    page = section({"mbytes": 4, "mbit": 100, "runs": 3, "off_max": 0.03, "loopback": [row]})
    assert "**+4.00% to +4.00%**" in page and "exact: **no**" in page
    assert set(FORMULAS) == set(TOPOLOGIES)
    simulated = [
        {"topology": name, "peers": 4, "plan_off": -0.04, "even_s": 1.0, "uneven_s": 2.0, "far_s": 0.25}
        for name in TOPOLOGIES
    ]
    page = section({"mbytes": 4, "mbit": 100, "runs": 3, "off_max": 0.03, "simulated": simulated})
    assert "| 1.0 / 2.0 / 0.25 |" in page and "off by 4.00% at most" in page and "exact: yes" in page
