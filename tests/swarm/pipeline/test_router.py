"""The router: shares follow speeds, new replicas get one probe, failures cost weight and probing restores it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.pipeline.router import ReplicaRouter, RouterConfig


def drive(
    router: ReplicaRouter, seconds: Mapping[str, float], count: int, start_s: float = 0.0
) -> tuple[Counter[str], float]:
    """Send `count` micro-batches one after another to replicas that take `seconds` each; return choices and end
    time."""
    chosen: Counter[str] = Counter()
    now_s = start_s
    for index in range(count):
        replica = router.choose(now_s)
        assert replica is not None
        router.sent(replica, (start_s, index), now_s)
        now_s += seconds[replica]
        router.succeeded(replica, (start_s, index), now_s)
        chosen[replica] += 1
    return chosen, now_s


def wired(seconds: Mapping[str, float], config: RouterConfig | None = None) -> tuple[ReplicaRouter, float]:
    """Return a router that has measured every replica."""
    router = ReplicaRouter(0, config)
    router.update(seconds, 0.0)
    _, now_s = drive(router, seconds, 20 * len(seconds))
    return router, now_s


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.02, 2.0), min_size=1, max_size=8))
def test_shares_follow_speeds(times: list[float]) -> None:
    seconds = {f"r{i}": s for i, s in enumerate(times)}
    router, now_s = wired(seconds)
    chosen, _ = drive(router, seconds, 2000, now_s)
    rate = sum(1 / s for s in times)
    for replica, s in seconds.items():
        # Interleaved: the share is right to within a micro-batch or two a replica, not merely on average.
        assert abs(chosen[replica] - 2000 / s / rate) <= 2 + len(times)


def test_choices_interleave() -> None:
    router, now_s = wired({"slow": 2.0, "fast": 1.0})
    chosen = []
    for index in range(9):
        replica = router.choose(now_s)
        assert replica is not None
        chosen.append(replica)
        router.sent(replica, index, now_s)
        now_s += {"slow": 2.0, "fast": 1.0}[replica]
        router.succeeded(replica, index, now_s)
    assert "slow slow" not in " ".join(chosen) and "fast fast fast" not in " ".join(chosen)


def test_choices_depend_on_the_seed() -> None:
    def choices(seed: int) -> list[str | None]:
        router = ReplicaRouter(seed)
        router.update([f"r{i}" for i in range(12)], 0.0)
        return [router.choose(0.0) for _ in range(12)]

    assert choices(1) == choices(1)
    assert sorted(map(str, choices(1))) == sorted(f"r{i}" for i in range(12))
    assert choices(1) != choices(2)


def test_new_replica_gets_one_probe_and_no_flood() -> None:
    seconds = {"a": 1.0, "b": 1.0}
    router, now_s = wired(seconds)
    drive(router, seconds, 200, now_s)
    now_s += 200.0
    router.update(["a", "b", "new"], now_s)
    now_s += router.config.enter_s
    chosen = [router.choose(now_s)]
    assert chosen == ["new"]
    router.sent("new", "probe", now_s)
    for index in range(10):  # while the probe is out, it gets nothing more
        replica = router.choose(now_s)
        assert replica in ("a", "b")
        router.sent(replica, index, now_s)
        now_s += 0.1
        router.succeeded(replica, index, now_s)
    router.succeeded("new", "probe", now_s)
    after, _ = drive(router, {"a": 0.1, "b": 0.1, "new": 1.0}, 60, now_s)
    assert 2 <= after["new"] <= 8  # its fair share is 60 / 21


def test_senders_probe_a_new_replica_at_different_times() -> None:
    tried = 0
    for seed in range(100):
        router = ReplicaRouter(seed)
        router.update(["a", "b"], 0.0)
        drive(router, {"a": 0.01, "b": 0.01}, 40)
        router.update(["a", "b", "new"], 10.0)
        tried += router.choose(10.0 + router.config.enter_s / 4) == "new"
    assert 10 <= tried <= 45  # a quarter of them, not one hundred


def test_timeout_costs_weight_and_probing_restores_it() -> None:
    seconds = {"a": 1.0, "b": 1.0}
    router, now_s = wired(seconds)
    router.sent("a", "lost", now_s)
    before = router.expected_s("a")
    router.failed("a", "lost", now_s)
    assert router.expected_s("a") >= 4 * before
    for index in range(50):  # nothing within the back-off
        assert router.choose(now_s) == "b"
        router.sent("b", index, now_s)
        router.succeeded("b", index, now_s + 0.001)
    chosen, now_s = drive(router, seconds, 6, now_s + 1.5 * router.config.probe_s)
    assert chosen["a"] >= 1  # one probe, then more
    chosen, now_s = drive(router, seconds, 60, now_s)
    assert router.expected_s("a") == pytest.approx(1.0, rel=0.05)
    chosen, _ = drive(router, seconds, 40, now_s)
    assert abs(chosen["a"] - 20) <= 2


def test_probes_of_a_dead_replica_become_rare() -> None:
    router, now_s = wired({"a": 0.1, "b": 0.1})
    probes = []
    for index in range(20_000):
        now_s += 0.05
        replica = router.choose(now_s)
        assert replica is not None
        router.sent(replica, index, now_s)
        if replica == "a":
            router.failed("a", index, now_s + 0.01)
            probes.append(now_s)
        else:
            router.succeeded("b", index, now_s + 0.05)
    gaps = [b - a for a, b in pairwise(probes)]
    assert 15 <= len(probes) <= 40  # 1000 s: doubling gaps up to a minute
    assert max(gaps) <= 1.25 * router.config.probe_max_s + 1
    assert gaps[5] > 4 * gaps[0]


def test_losses_of_one_failure_count_once() -> None:
    router, now_s = wired({"a": 1.0, "b": 1.0})
    for index in range(10):
        router.sent("a", index, now_s)
    deadline = router.deadline_s("a")
    for index in range(10):
        router.failed("a", index, now_s + 0.01 * index)
    assert router.deadline_s("a") <= 2 * deadline


def test_overdue_replica_is_a_second_choice() -> None:
    router, now_s = wired({"frozen": 1.0, "b": 1.0})
    router.sent("frozen", "stuck", now_s)
    late_s = now_s + router.config.overdue * 1.0 + 0.1
    assert {router.choose(late_s) for _ in range(10)} == {"b"}
    assert router.choose(late_s, exclude=["b"]) == "frozen"  # better than none


def test_replica_that_left_is_forgotten() -> None:
    router, now_s = wired({"a": 1.0, "b": 1.0})
    router.sent("a", 1, now_s)
    router.update(["b"], now_s)
    router.succeeded("a", 1, now_s)  # late news of it does no harm
    router.failed("a", 1, now_s)
    assert router.replicas == ("b",) and router.choose(now_s) == "b"


def test_published_queues_shift_work_gradually() -> None:
    router, now_s = wired({"a": 1.0, "b": 1.0})
    router.published("a", 9, 1.0, 0.0)
    assert 1.0 < router.expected_s("a") < 5.0  # one record, seconds old, is not the truth
    for _ in range(40):
        router.published("a", 9, 1.0, 0.0)
    chosen = Counter(router.choose(now_s) for _ in range(110))
    assert 8 <= chosen["a"] <= 12  # ten times as long, a tenth of the other's share


def test_published_claims_are_bounded() -> None:
    router, now_s = wired({"a": 1.0, "b": 1.0})
    for queue, service_s in ((math.nan, 1.0), (-1.0, 1.0), (1.0, math.inf)):
        router.published("a", queue, service_s, 0.0)
    assert router.expected_s("a") == pytest.approx(1.0)
    router.update(["a", "b", "boaster"], now_s)
    router.published("boaster", 0, 1e-9, 0.0)
    assert router.expected_s("boaster") == pytest.approx(0.25)


def test_stated_waiting_is_bounded_by_our_clock() -> None:
    router, now_s = wired({"a": 1.0, "b": 1.0})
    for index in range(100):
        router.sent("a", index, now_s)
        router.succeeded("a", index, now_s + 1.0, downstream_s=math.nan, queued_s=50.0)
    assert router.expected_s("a") == pytest.approx(1.0, rel=0.01)  # it all counts as waiting there


def test_downstream_time_does_not_count_against_a_replica() -> None:
    router, now_s = wired({"a": 1.0, "b": 1.0})
    for index in range(100):
        router.sent("a", index, now_s)
        router.succeeded("a", index, now_s + 4.0, downstream_s=3.0)
    assert router.expected_s("a") == pytest.approx(1.0, rel=0.01)
    assert router.deadline_s("a") > 4.0  # but the deadline covers the whole call


def test_full_queue_is_no_failure() -> None:
    router, now_s = wired({"a": 1.0, "b": 1.0})
    router.sent("a", "x", now_s)
    router.declined("a", "x", now_s)
    assert {router.choose(now_s + 0.5) for _ in range(5)} == {"b"}
    assert router.expected_s("a") == pytest.approx(1.0)
    assert "a" in {router.choose(now_s + 2.0) for _ in range(5)}


def test_deadlines_follow_the_answers() -> None:
    router = ReplicaRouter(0)
    router.update(["a", "b"], 0.0)
    assert router.deadline_s("a") == router.config.deadline_first_s
    drive(router, {"a": 2.0, "b": 2.0}, 100)
    assert 8.0 < router.deadline_s("a") < 9.0
    assert router.deadline_s("a", work=3.0) == pytest.approx(3 * router.deadline_s("a"))
    before = router.deadline_s("a")
    router.sent("a", "x", 300.0)
    router.failed("a", "x", 300.0)
    assert router.deadline_s("a") == pytest.approx(2 * before)
    router.update(["a", "b", "new"], 300.0)
    assert router.deadline_s("new") >= router.deadline_s("b")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.sampled_from("cfsun"), max_size=300))
def test_router_always_picks_a_replica(seed: int, happenings: list[str]) -> None:
    """c: choose and send, f: the oldest fails, s: the oldest succeeds, u: one leaves or returns, n: time passes."""
    router = ReplicaRouter(seed)
    names = ["a", "b", "c"]
    router.update(names, 0.0)
    now_s, outstanding = 0.0, []
    for index, happening in enumerate(happenings):
        if happening == "c":
            chosen = router.choose(now_s, exclude=["a"])
            assert chosen in router.replicas and chosen != "a"
            router.sent(chosen, index, now_s)
            outstanding.append((chosen, index))
        elif happening in "fs" and outstanding:
            replica, sent = outstanding.pop(0)
            (router.failed if happening == "f" else router.succeeded)(replica, sent, now_s)
        elif happening == "u":
            names = ["a", "b", "c"] if len(names) == 2 else ["a", "b"]
            router.update(names, now_s)
        now_s += 0.3 if happening == "n" else 0.0
        assert 0.5 <= router.deadline_s("b") <= 120.0
