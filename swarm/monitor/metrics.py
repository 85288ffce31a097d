"""The state as Prometheus metrics: base units, closed sets of labels, none of them a peer. What nothing counts is left
out, since a flat 0 would read as "none"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from peer.catalogue.groups import PeerPenalized
from peer.catalogue.stages import MoveFinished
from swarm.membership.member_record import installed_version
from swarm.monitor.told_counts import ToldCounts
from swarm.status.head_chain import HeadChain
from swarm.status.state import MonitorState, StageState
from swarm.status.time_histogram import TimeHistogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LEVELS: Final = ("good", "edge", "waiting", "bad", "over", "unknown")
_P: Final = "barnraise_"


def metrics_text(state: MonitorState, chains: Sequence[HeadChain], told: ToldCounts) -> bytes:
    """Return the exposition of one state."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(state, chains, told))
    text: bytes = generate_latest(registry)
    return text


class _Families:
    """The metric families of one state. Implements prometheus-client's collector."""

    def __init__(self, state: MonitorState, chains: Sequence[HeadChain], told: ToldCounts) -> None:
        self._state, self._chains, self._told = state, chains, told

    def collect(self) -> Iterator[Metric]:
        state, watch = self._state, self._state.monitor
        yield _gauge(
            "verdict", "The verdict: 1 at its level.", ("level",),
            [((level,), float(level == state.verdict.level)) for level in LEVELS],
        )  # fmt: skip
        if watch.reading_s is not None:
            yield _gauge(
                "monitor_scrape_duration_seconds", "Of the last reading of the run.", (), [((), watch.reading_s)]
            )
        if watch.last_success is not None:
            name = "monitor_last_success_timestamp_seconds"
            yield _gauge(name, "When the run was last read.", (), [((), watch.last_success)])
        found = Counter((alert.name, alert.severity) for alert in state.alerts)
        about = "Alerts that hold now, by name and severity."
        yield _gauge("alerts", about, ("alert", "severity"), found.items())
        if state.kind == "unknown":
            return
        labels = (state.run_id, installed_version(), state.method, state.codec)
        about = "The run watched; `version` is the monitor's."
        yield _gauge("run_info", about, ("run", "version", "method", "codec"), [(labels, 1.0)])
        yield _gauge("peers", "Peers by role and by how they say they are reached.", ("role", "link"), self._peers())
        yield from self._counted_of_events()
        yield from self._run() if state.kind == "run" else self._model()

    def _peers(self) -> Iterable[tuple[tuple[str, ...], float]]:
        counted = Counter(
            (member.claims.role, member.seen.link) for member in self._state.members if member.claims is not None
        )
        return [(labels, float(count)) for labels, count in sorted(counted.items())]

    def _run(self) -> Iterator[Metric]:
        stages = self._state.stages
        facts = [(stage, stage.facts) for stage in stages if stage.facts]
        yield _counter("commits", "Round of the last proved head.", ("stage",), [(_of(s), f.round) for s, f in facts])
        ages = [(_of(stage), age) for stage in stages if (age := stage.seen.commit_age_s) is not None]
        yield _gauge("commit_age_seconds", "Since that head was new to this monitor.", ("stage",), ages)
        yield _gauge("members", "Members of that head.", ("stage",), [(_of(s), f.members) for s, f in facts])
        yield _gauge("quorum", "Members that a commit needs.", ("stage",), [(_of(s), f.quorum) for s, f in facts])
        margins = [(_of(stage), margin) for stage in stages if (margin := stage.seen.margin) is not None]
        yield _gauge("quorum_margin", "Members that answer, less the quorum.", ("stage",), margins)
        replicas = [((str(s.stage), "working"), s.claims.replicas) for s in stages]
        replicas += [((str(s.stage), "arriving"), s.claims.arriving) for s in stages]
        yield _gauge("replicas", "Replicas, as they claim.", ("stage", "state"), sorted(replicas))
        queues = [(_of(stage), queue) for stage in stages if (queue := stage.claims.queue) is not None]
        yield _gauge("queue_microbatches", "That wait at a replica, as these claim.", ("stage",), queues)
        if facts:
            tokens = min(fact.tokens for _, fact in facts)
            yield _counter("tokens", "Tokens in the last head that all stages have reached.", (), [((), tokens)])
        yield from self._data_set()
        yield _gauge("loss", "The last that members claim.", ("kind", "unit"), self._losses())
        yield from self._counted()

    def _data_set(self) -> Iterator[Metric]:
        if (data_set := self._state.data_set) is None:
            return
        kept = sum(member.kept for member in data_set.members.values())
        for name, about, value in (
            ("data_set_epochs", "That the run has trained on.", data_set.epochs),
            ("data_set_pages", "Of the run's data set.", data_set.pages),
            ("data_set_pages_kept", "By all peers together, as they claim.", kept),
            ("page_ranges", "Ranges of pages, of which each peer says whether it keeps them.", data_set.ranges),
            ("page_ranges_rare", "Ranges that fewer than two peers say they keep.", data_set.rare),
            ("pages_waited_seconds", "Idle for want of pages, all peers in ten minutes.", data_set.waited_s),
        ):
            yield _gauge(name, about, (), [((), value)])

    def _losses(self) -> list[tuple[tuple[str, ...], float]]:
        unit, found = "nats_per_token", list[tuple[tuple[str, ...], float]]()
        for kind, values in (
            ("train", [point.train for point in self._state.loss]),
            ("held_out", [point.held_out for point in self._state.loss]),
        ):
            known = [value for value in values if value is not None]
            found += [((kind, unit), known[-1])] if known else []
        return found

    def _counted(self) -> Iterator[Metric]:
        """Yield what the heads that came while the monitor looked add up to."""
        counts: Counter[str] = Counter()
        for chain in self._chains:
            counts.update(chain.counts)
        if not any(chain.heads for chain in self._chains):
            return
        attempts = [(("committed",), counts["committed"]), (("retried",), counts["retried"])]
        yield _counter("round_attempts", "Since the monitor started.", ("outcome",), attempts)
        parts = [(("absent",), counts["absent"]), (("merged",), counts["merged"])]
        yield _counter("contributions", "To rounds since the monitor started.", ("outcome",), parts)
        times = [
            (str(stage), chain.round_times) for stage, chain in enumerate(self._chains) if any(chain.round_times.counts)
        ]
        if times:
            about = "From one commit to the next, as this monitor met with them, since it started."
            yield _histogram("round_duration_seconds", about, "stage", times)
        yield _counter("regroups", "Terms that began since the monitor started.", (), [((), counts["regroups"])])

    def _counted_of_events(self) -> Iterator[Metric]:
        """Yield what members' events add up to, where a member has told one."""
        for event, name, about in (
            (PeerPenalized, "penalties", "Answers that peers say they refused as false."),
            (MoveFinished, "moves", "Moves to another stage that peers say they ended."),
        ):
            if count := self._told.events[event]:
                yield _counter(name, about, (), [((), count)])
        if self._told.phases:
            about = "How long a phase of a round took, as members claim."
            yield _histogram("phase_duration_seconds", about, "phase", sorted(self._told.phases.items()))

    def _model(self) -> Iterator[Metric]:
        served = sum(row.end - row.first for row in self._state.blocks if row.servers)
        split = [(("missing",), self._state.blocks_total - served), (("served",), served)]
        yield _gauge("blocks", "Blocks of the model with and without a server, as these claim.", ("state",), split)
        if self._state.blocks:
            least = min(row.servers for row in self._state.blocks)
            yield _gauge("block_servers_min", "Servers of the block that has the fewest.", (), [((), least)])


def _of(stage: StageState) -> tuple[str, ...]:
    return (str(stage.stage),)


Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, about: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(_P + name, about, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, about: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(_P + name, about, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, about: str, label: str, samples: Iterable[tuple[str, TimeHistogram]]) -> Metric:
    family = HistogramMetricFamily(_P + name, about, labels=(label,))
    for value, times in samples:
        family.add_metric((value,), times.buckets, times.total_s)
    return family
