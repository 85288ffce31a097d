"""What events add up to, and how Prometheus reads it."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from swarm.monitor.metrics import metrics_text
from swarm.monitor.told_counts import LONGEST_S, PEERS_MAX, ToldCounts
from swarm.status.head_chain import HeadChain
from tests.swarm.status.scenes import NOW, chain_of, finite, heads_of, peer, shown, told


def test_phases_are_timed_by_the_next_one_of_the_same_round() -> None:
    counts = ToldCounts(NOW)
    counts.take("a", told("phase_entered", at=NOW - 5, round=1, phase="compute"))
    for at, number, phase in (
        (1, 1, "submit"), (3, 1, "exchange"), (4, 2, "compute"), (64, 2, "submit"), (65, 2, "vote"), (66, 3, "<b>"),
        (67, 3, "exchange"), (60, 3, "vote"), (1e9, 4, "compute"), (3e9, 4, "submit"),
    ):  # fmt: skip
        counts.take("a", told("phase_entered", at=NOW + at, round=number, phase=phase))
    found = {phase: (sum(times.counts), times.total_s) for phase, times in counts.phases.items()}
    assert found == {"submit": (1, 2.0), "compute": (2, 60.0 + LONGEST_S), "exchange": (1, 0.0)}
    for number in range(2 * PEERS_MAX):
        counts.take(f"peer {number}", told("phase_entered", at=NOW, round=1, phase="compute"))
    assert len(counts._entered) == PEERS_MAX


def test_prometheus_reads_it_and_what_nobody_told_is_left_out() -> None:
    counts = ToldCounts(NOW)
    state = shown(finite(), {"a": peer(name="a")}, [HeadChain()], "a")

    def families() -> dict[str, Metric]:
        text = metrics_text(state, [], counts).decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    unknown = {"barnraise_penalties", "barnraise_moves", "barnraise_phase_duration_seconds"}
    assert not {*unknown, "barnraise_round_duration_seconds"} & families().keys()
    counts.take("a", told("peer_penalized", at=NOW + 1, peer="b", reason="x"))
    counts.take("a", told("move_finished", at=NOW - 1, target=1))
    counts.take("a", told("phase_entered", at=NOW, round=1, phase="compute"))
    counts.take("a", told("phase_entered", at=NOW + 20, round=1, phase="submit"))
    found = families()
    assert found["barnraise_penalties"].samples[0].value == 1 and "barnraise_moves" not in found
    phases = {
        (s.name.removeprefix("barnraise_phase_duration_"), s.labels.get("le")): s.value
        for s in found["barnraise_phase_duration_seconds"].samples
    }
    assert phases["seconds_bucket", "10.0"] == 0 and phases["seconds_bucket", "30.0"] == 1
    assert phases["seconds_bucket", "+Inf"] == 1 and phases["seconds_sum", None] == 20


def test_prometheus_reads_how_long_rounds_took() -> None:
    manifest = finite(2)
    chains = [chain_of(heads_of(manifest, "a", rounds, stage)) for stage, rounds in enumerate((3, 0))]
    text = metrics_text(shown(manifest, {"a": peer(name="a")}, chains, "a"), chains, ToldCounts(NOW)).decode()
    [family] = [f for f in text_string_to_metric_families(text) if f.name == "barnraise_round_duration_seconds"]
    found = {(sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value for sample in family.samples}
    assert {sample.labels["stage"] for sample in family.samples} == {"0"} and family.type == "histogram"
    assert (found["bucket", "3.0"], found["bucket", "10.0"], found["bucket", "+Inf"]) == (0, 3, 3)
    assert (found["count", None], found["sum", None]) == (3, 30)
