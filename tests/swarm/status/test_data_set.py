"""What a monitor makes of a run's data set: how far it is, who keeps pages, and who waits for which."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from peer.catalogue.reading import Heard
from peer.config import DataConfig, PagesConfig
from swarm.monitor.metrics import metrics_text
from swarm.monitor.told_counts import ToldCounts
from swarm.pages.holdings import HoldingsRecord, PageRanges
from swarm.run.manifest import Manifest
from swarm.status.alerts import Alerts
from swarm.status.data_set_reading import data_set_state
from swarm.status.reading import RunReading
from swarm.status.run_state import run_state
from swarm.status.state import MonitorState
from tests.swarm.status.scenes import NOW, WATCH, chain_of, finite, heads_of, history_of, peer, proven, told

SEQ_LEN = 1023  # 2048 windows of 2 bytes an id in a page
PAGES = PagesConfig(root="ab" * 32, index_bytes=500, row_bytes=2048, windows=5 * 2048, held_out_windows=10)
TOTAL = 6
ALL = range(TOTAL)


def of_pages() -> Manifest:
    manifest = finite()
    model = replace(manifest.model, vocab_size=256, max_seq_len=SEQ_LEN)
    data = DataConfig(seq_len=SEQ_LEN, source="pages", pages=PAGES)
    return replace(manifest, model=model, data=data, requires=("pages", *manifest.requires))


def keeps(*pages: int) -> HoldingsRecord:
    return HoldingsRecord(at=NOW, kept=PageRanges(TOTAL).encode(set(pages)))


def shown(kept: Mapping[str, HoldingsRecord], events: Mapping[str, list[Heard]], tokens: int = 1000) -> MonitorState:
    """A run of a, b and c at round 4, which has trained on so many tokens."""
    manifest, records = of_pages(), {name: peer(name=f"{name}nn", round=4) for name in "abc"}
    records[manifest.authority] = peer(name="coordinator", role="coordinator", round=4)
    heads = heads_of(manifest, "abc", 4)
    heads[-1] = replace(heads[-1], tokens=tokens)
    chain = chain_of(heads)
    reading = RunReading(manifest, NOW, records, (proven(heads[-1], "abc"),), holdings=kept)
    return run_state(reading, [chain], events, {}, history_of(records), WATCH)


def test_the_state_tells_how_far_the_run_is_and_who_keeps_pages() -> None:
    epoch = PAGES.windows * SEQ_LEN
    kept = {"W": keeps(*ALL), "a": keeps(0, 1), "b": keeps(1)}
    waits = [told("samples_awaited", at=NOW - 700, seconds=9.0), told("samples_awaited", at=NOW - 9, seconds=1.5)]
    state = shown(kept, {"a": waits, "c": [told("samples_awaited", at=NOW - 9, seconds=2.0)]}, tokens=epoch + 1000)
    found = state.data_set
    assert found is not None and found.root == PAGES.root
    assert found.epochs == pytest.approx(1 + 1000 / epoch) and found.tokens_left == epoch - 1000
    assert (found.pages, found.ranges, found.rare, found.unkept, found.waited_s) == (TOTAL, TOTAL, 4, 0, 3.5)
    assert {name: (one.kept, one.waited_s) for name, one in found.members.items()} == {
        "W": (6, 0.0), "a": (2, 1.5), "b": (1, 0.0), "c": (0, 2.0),
    }  # fmt: skip
    assert state.verdict.word == "healthy"  # few holders alone are no trouble


def test_pages_of_long_ranges_are_counted_whole() -> None:
    manifest = of_pages()
    pages = replace(PAGES, windows=2048 * 5001)  # ranges of three pages, the last one of one
    data = replace(manifest.data, pages=pages)
    total = 5002
    ranges = PageRanges(total)
    kept = {"a": ranges.encode(range(total)), "b": ranges.encode({0, 1, 2, 3, total - 1}), "c": b""}
    records = {name: HoldingsRecord(at=NOW, kept=bits) for name, bits in kept.items()}
    found = data_set_state(RunReading(replace(manifest, data=data), NOW, {}, (None,), holdings=records), {})
    assert found is not None and found.pages == total
    assert {name: one.kept for name, one in found.members.items()} == {"a": total, "b": 4, "c": 0}


def test_a_run_without_a_data_set_has_no_state_of_one() -> None:
    assert data_set_state(RunReading(finite(), NOW, {}, (None,)), {}) is None


def test_a_page_that_a_peer_waits_for_is_a_condition() -> None:
    waits = {"b": [told("page_missing", at=NOW - 300, page=4)], "c": [told("page_missing", at=NOW - 5, page=0)]}
    state = shown({"a": keeps(0, 1, 2, 3)}, waits)
    verdict = state.verdict
    assert (verdict.level, verdict.word) == ("edge", "short of pages")
    assert "bnn cannot get page 4 of the data set, which no peer keeps, nor 1 other page;" in verdict.reason
    assert "of 6 ranges of pages 6 have fewer than two holders" in verdict.reason and "--data DIR" in verdict.remedy
    alerts, names = Alerts(), set[str]()
    for after in (0.0, 29.0, 31.0):
        names = {one.name for one in alerts.on(state, NOW + after).alerts}
        assert ("page_missing" in names) == (after > 30)


@pytest.mark.parametrize(
    ("kept", "at", "page"),
    [
        ({"b": keeps(4)}, NOW - 5, 4),  # it came
        ({"a": keeps(4)}, NOW - 300, 4),  # another keeps it, so b has had it and dropped it
        ({}, NOW - 700, 4),
        ({}, NOW - 5, TOTAL),  # there is no such page
        ({}, NOW - 5, 1 << 60),
        ({}, NOW - 5, -1),
    ],
)
def test_what_came_or_cannot_be_is_no_condition(kept: dict[str, HoldingsRecord], at: float, page: int) -> None:
    state = shown(kept, {"b": [told("page_missing", at=at, page=page)]})
    assert state.data_set is not None and not state.data_set.missing and state.verdict.word == "healthy"


def test_strangers_words_stay_in_their_bounds() -> None:
    kept = {"x": HoldingsRecord(at=NOW, kept=b"\xff" * 256)}  # bits of ranges that there are not
    waits = [told("samples_awaited", at=NOW, seconds=seconds) for seconds in (float("nan"), -5.0, 1e18)]
    state = shown(kept, {"a": waits, "stranger": [told("page_missing", at=NOW, page=1)]})
    found = state.data_set
    assert found is not None and found.members["x"].kept == TOTAL and found.waited_s == 600.0 and not found.missing


def test_metrics_add_peers_up() -> None:
    state = shown({"W": keeps(*ALL), "a": keeps(0)}, {"a": [told("samples_awaited", at=NOW, seconds=1.5)]})
    text = metrics_text(state, [], ToldCounts(NOW)).decode()
    for line in ("data_set_pages_kept 7.0", "data_set_pages 6.0", "page_ranges 6.0", "page_ranges_rare 5.0"):
        assert f"\nbarnraise_{line}\n" in text
    assert "\nbarnraise_pages_waited_seconds 1.5\n" in text and "barnraise_data_set_epochs" in text
