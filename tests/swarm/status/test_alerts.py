"""Every alert fires from its fault, after its time and not before, and ends with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from swarm.monitor.notices import SETTLED_S, MonitorNotices
from swarm.protocol.head import Head
from swarm.status.alerts import RULES, Alerts
from swarm.status.data_set import DataSetState, MissingPage
from swarm.status.head_chain import HeadChain
from swarm.status.help_wanted import help_wanted
from swarm.status.state import Alert, LossPoint, MonitorState, Verdict
from tests.swarm.status.scenes import (
    NOW,
    chain_of,
    finite,
    heads_of,
    model_shown,
    next_head,
    peer,
    server,
    shown,
    told,
)

RELAYED = ["/ip4/192.0.2.1/tcp/1/p2p/relay/p2p-circuit"]


def run(away: str = "", chain: HeadChain | None = None, mode: str = "witness", **more: Any) -> MonitorState:
    """Three members at round 4 and the coordinator, of whom those of `away` are."""
    manifest = finite(coordinator=mode)
    records = {name: peer(name=f"{name}nn", speed=2.0, round=4) for name in "abc" if name not in away}
    if "W" not in away:
        records[manifest.authority] = peer(name="coordinator", role="coordinator", round=4)
    records |= more.pop("records", {})
    chain = chain or chain_of(heads_of(manifest, "abc", 4))
    return shown(manifest, records, [chain], [name for name in "abc" if name not in away], **more)


def pipeline(*stages: int, slowest_s: float = 0.5) -> MonitorState:
    """Two stages, and replicas at these, of whom the last one takes so long for a micro-batch."""
    manifest = finite(2)
    records = {f"p{n}": peer(name=f"p{n}", role="stage", stage=s, service_s=0.5) for n, s in enumerate(stages)}
    records |= {f"p{len(stages) - 1}": replace(records[f"p{len(stages) - 1}"], service_s=slowest_s)}
    records[manifest.authority] = peer(name="coordinator", role="coordinator")
    chains = [chain_of(heads_of(manifest, list(records)[:1], 2, stage)) for stage in (0, 1)]
    return shown(manifest, records, chains, list(records)[:1])


def often(absent: int, of: int) -> HeadChain:
    """A chain whose last rounds were made without c, so many of them."""
    heads: list[Head] = heads_of(finite(rounds=99), "abc", 2)
    for number in range(of):
        heads.append(next_head(heads[-1], absent=["c"] if number < absent else []))
    return chain_of(heads)


def ends(behind_s: float) -> MonitorState:
    """A run of ten rounds, each of which b ended so much after a and c."""
    chain = chain_of(heads_of(finite(rounds=99), "abc", 10))
    events = {
        name: [told("round_trained", at=NOW - 100 + 10 * number + late, round=number) for number in range(1, 11)]
        for name, late in (("a", 0.0), ("b", behind_s), ("c", 0.0))
    }
    return run(chain=chain, told=events)


def losses(*train: float, held_out: float | None = None) -> MonitorState:
    points = [LossPoint(round=n, train=value, peers=3, held_out=None) for n, value in enumerate(train)]
    held = [3.0, 2.9, 2.8, held_out]
    points += [LossPoint(round=100 + n, train=None, peers=0, held_out=h) for n, h in enumerate(held) if h is not None]
    return replace(run(), loss=tuple(points))


def of_pages(*missing: MissingPage) -> MonitorState:
    data_set = DataSetState(
        root="ab" * 32, tokens=100, epochs=0.5, tokens_left=50, pages=9, ranges=9, rare=2, unkept=1, waited_s=0.0,
        missing=missing,
    )  # fmt: skip
    return replace(run(), data_set=data_set)


@dataclass(frozen=True)
class Fault:
    alert: str
    severity: str
    after_s: float
    broken: Callable[[], MonitorState]
    mended: Callable[[], MonitorState]
    says: str


FAULTS = [
    Fault(
        "run_stalled",
        "critical",
        0,
        lambda: run(chain=chain_of(heads_of(finite(), "abc", 4), 200)),
        run,
        "no commit for 3 min",
    ),
    Fault("quorum_at_edge", "warning", 120, lambda: run("c"), run, "one more that falls silent"),
    Fault("quorum_lost", "critical", 30, lambda: run("bc"), run, "1 of the 3 members of round 4 answer"),
    Fault("single_replica", "warning", 600, lambda: pipeline(0, 0, 1), lambda: pipeline(0, 0, 1, 1), "stage 1 has one"),
    Fault(
        "stage_lost",
        "critical",
        0,
        lambda: pipeline(0, 0),
        lambda: pipeline(0, 0, 1),
        "stage 1 (blocks 3 to 5) has no replica",
    ),
    Fault("coordinator_away", "warning", 600, lambda: run("W"), run, "rounds go on"),
    Fault("coordinator_away", "critical", 0, lambda: run("W", mode="required"), run, "each commit needs its vote"),
    Fault(
        "page_missing",
        "critical",
        30,
        lambda: of_pages(MissingPage(page=7, peers=("a",), holders=0)),
        of_pages,
        "ann cannot get page 7 of the data set, which no peer keeps; of 9 ranges of pages 2 have fewer",
    ),
    Fault(
        "page_missing",
        "warning",
        30,
        lambda: of_pages(MissingPage(page=7, peers=("a", "b", "c"), holders=1)),
        of_pages,
        "ann, bnn and 1 other peer cannot get page 7 of the data set, which 1 peer should have",
    ),
    Fault(
        "relay_heavy",
        "warning",
        60,
        lambda: run(records={f"{n}": peer(name=f"r{n}", addresses=RELAYED) for n in range(5)}),
        run,
        "5 of 9 peers can be reached through one relay only",
    ),
    Fault(
        "often_absent", "warning", 0, lambda: run(chain=often(4, 20)), lambda: run(chain=often(3, 20)), "nothing of cnn"
    ),
    Fault(
        "often_last", "info", 0, lambda: ends(3.0), lambda: ends(0.5), "bnn ended its training last in 10 of 10 rounds"
    ),
    Fault(
        "slow_replica",
        "info",
        10,
        lambda: pipeline(0, 1, 1, 1, slowest_s=1.2),
        lambda: pipeline(0, 1, 1, 1, slowest_s=0.9),
        "p3 takes 1.2 s for a micro-batch, where the other replicas of stage 1 take 0.5 s",
    ),
    Fault(
        "peer_refused",
        "warning",
        0,
        lambda: run(told={name: [told("peer_penalized", peer="c", reason="NaN")] for name in "ab"}),
        lambda: run(told={name: [told("peer_penalized", at=NOW - 700, peer="c", reason="NaN")] for name in "ab"}),
        "2 peers refuse what cnn sent: NaN",
    ),
    Fault(
        "cannot_save",
        "critical",
        0,
        lambda: run(told={"a": [told("checkpoint_failed", round=3)]}),
        lambda: run(told={"a": [told("checkpoint_failed", round=3), told("checkpoint_saved", round=4)]}),
        "ann could not save",
    ),
    Fault(
        "worker_dies", "warning", 0, lambda: run(told={"a": [told("worker_died")] * 3}), run, "3 times in ten minutes"
    ),
    Fault(
        "roster_full",
        "warning",
        0,
        lambda: run(told={"a": [told("roster_full", round=4, members=1, bytes=786000, left_out=2)]}),
        lambda: run(told={"a": [told("roster_full", at=NOW - 700, round=1, members=1, bytes=786000, left_out=2)]}),
        "no room for 2 of the updates",
    ),
    Fault("clock_skew", "warning", 0, lambda: run(records={"d": peer(name="dnn", at=NOW + 90)}), run, "dnn"),
    Fault("version_skew", "info", 600, lambda: run(records={"d": peer(name="d", version="9.9")}), run, "1 with 9.9"),
    Fault("loss_spike", "warning", 0, lambda: losses(held_out=2.95), lambda: losses(held_out=2.85), "is 2.950"),
    Fault(
        "loss_flat", "info", 0, lambda: losses(*[2.0] * 60), lambda: losses(*[2.0] * 40, *[1.9] * 20), "for 40 rounds"
    ),
    Fault(
        "blocks_lost",
        "critical",
        0,
        lambda: model_shown({"a": server(0, 3)}),
        lambda: model_shown(four()),
        "blocks 3 to",
    ),
    Fault(
        "single_server",
        "warning",
        600,
        lambda: model_shown({"a": server(0, 4)}),
        lambda: model_shown(four()),
        "one server",
    ),
    Fault(
        "servers_full",
        "warning",
        60,
        lambda: model_shown({name: server(0, 4, pages=100, pages_free=2) for name in "ab"}),
        lambda: model_shown({name: server(0, 4, pages=100, pages_free=40) for name in "ab"}),
        "are full",
    ),
]


def four() -> dict[str, Any]:
    return {name: server(0, 4) for name in "ab"}


def named(state: MonitorState, name: str) -> list[Alert]:
    return [alert for alert in state.alerts if alert.name == name]


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.alert} {fault.severity}" for fault in FAULTS])
def test_an_alert_fires_after_its_time_and_ends(fault: Fault) -> None:
    alerts, broken = Alerts(), fault.broken()
    assert named(alerts.on(fault.mended(), NOW - 1), fault.alert) == []
    if fault.after_s:
        assert named(alerts.on(broken, NOW), fault.alert) == []
        assert named(alerts.on(broken, NOW + fault.after_s - 1), fault.alert) == []
    [fired] = named(alerts.on(broken, NOW + fault.after_s), fault.alert)
    assert fired.severity == fault.severity and fault.says in fired.text and fired.remedy and fired.basis
    assert fired.since == NOW
    assert named(alerts.on(fault.mended(), NOW + 1000), fault.alert) == []
    if fault.after_s:
        assert named(alerts.on(broken, NOW + 1001), fault.alert) == [], "its time begins again"


def test_every_rule_has_a_fault() -> None:
    found = {rule for fault in FAULTS for rule in RULES if any(one.name == fault.alert for one in rule(fault.broken()))}
    assert found == set(RULES)


def test_nothing_is_wrong_with_a_healthy_run_and_nothing_with_one_that_is_over() -> None:
    assert Alerts().on(run(), NOW).alerts == ()
    over = replace(run("bcW"), verdict=Verdict(level="over", word="complete", reason="", basis=("facts",)))
    assert Alerts().on(over, NOW + 1000).alerts == ()


def test_the_gravest_come_first_and_a_failed_reading_ends_none() -> None:
    alerts, broken = Alerts(), run("bcW")
    alerts.on(broken, NOW)
    state = alerts.on(broken, NOW + 700)
    assert [alert.name for alert in state.alerts] == ["quorum_lost", "coordinator_away"]
    blind = replace(state, monitor=replace(state.monitor, failure="no peer could be reached", last_success=NOW + 700))
    assert [alert.name for alert in alerts.on(blind, NOW + 750).alerts] == ["quorum_lost", "coordinator_away"]
    blind = alerts.on(blind, NOW + 800)
    assert [alert.name for alert in blind.alerts] == ["quorum_lost", "coordinator_away", "monitor_blind"]
    again = alerts.on(broken, NOW + 805)
    assert [(alert.name, alert.since) for alert in again.alerts] == [("quorum_lost", NOW), ("coordinator_away", NOW)]


def test_where_one_more_machine_helps_most() -> None:
    assert help_wanted(run()).startswith("3 peers train; one more of their usual speed makes a round's work 1/3 larger")
    assert help_wanted(run("bc")).startswith("1 peer trains; another one of its speed doubles a round's work")
    assert "stage 1 is the slowest, with one replica" in help_wanted(pipeline(0, 0, 1))
    assert "from 2 to 4 micro-batches a second" in help_wanted(pipeline(0, 0, 1))
    assert help_wanted(pipeline(0, 0)).startswith("stage 1 has no replica: `peer join INVITE --stage 1`")
    assert help_wanted(model_shown({"a": server(0, 3)})).startswith("blocks 3 to 3 have no server")
    assert help_wanted(replace(run(), verdict=Verdict(level="over", word="", reason="", basis=()))) == ""


class Told:
    """A collector's clock, and what a webhook is given."""

    def __init__(self) -> None:
        self.now = NOW
        self.sent: list[dict[str, Any]] = []

    def send(self, notice: dict[str, Any]) -> None:
        self.sent.append(notice)


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MonitorNotices, Told]]:
    told_of: Any = Told()
    made = MonitorNotices("http://127.0.0.1:9/", told_of, lambda event, reason: None)
    monkeypatch.setattr(made, "_webhook", told_of)
    yield made, told_of


def test_a_verdict_is_told_once_it_has_settled_and_an_alert_at_its_ends(notices: tuple[MonitorNotices, Told]) -> None:
    made, told_of = notices
    alerts = Alerts()
    made.note(alerts.on(run(), NOW))
    made.note(alerts.on(run("bc"), NOW))
    assert told_of.sent == [], "it is healthy, and then nothing has settled"
    told_of.now += SETTLED_S
    made.note(alerts.on(run("bc"), told_of.now))
    [verdict] = told_of.sent
    assert (verdict["event"], verdict["level"], verdict["word"]) == ("verdict", "bad", "stopped") and verdict["remedy"]
    told_of.now += 30
    made.note(alerts.on(run("bc"), told_of.now))
    assert [(n["event"], n.get("alert")) for n in told_of.sent[1:]] == [("alert", "quorum_lost")]
    made.note(alerts.on(run(), told_of.now))
    assert [(n["event"], n.get("alert")) for n in told_of.sent[2:]] == [("alert_over", "quorum_lost")]
    told_of.now += SETTLED_S
    made.note(alerts.on(run(), told_of.now))
    assert (told_of.sent[-1]["event"], told_of.sent[-1]["level"]) == ("verdict", "good")
    assert all(msgspec.json.encode(notice) for notice in told_of.sent)


def test_a_view_of_strangers_words_stays_plain() -> None:
    state = run(told={name: [told("peer_penalized", peer="c", reason="\x1b[31m" + "x" * 500)] for name in "ab"})
    [alert] = named(Alerts().on(state, NOW), "peer_refused")
    assert "\x1b" not in alert.text and len(alert.text) < 250
