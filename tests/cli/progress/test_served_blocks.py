"""What `peer serve` shows of its events: phases with their rates, then sessions and tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.progress.served_blocks import SECONDS, ServedBlocks
from cli.views.served_blocks import served_blocks_lines, served_blocks_view
from tests.cli.progress.test_odd_events import VALUES, drawn

GB = 10**9
EVENTS = (
    "model_entered", "worker_died", "commit_served", "commit_unserved", "server_moves", "blocks_served",
    "load_changed", "loading_begun", "loading_progress", "loading_ended", "worker_ready",
)  # fmt: skip
FIELDS = (
    "name", "blocks", "first", "end", "phase", "size_bytes", "done_bytes", "seconds", "sessions", "clients", "tokens",
    "waiting_tokens", "pages", "pages_free", "step_ms", "round", "reason", "cause",
)  # fmt: skip
EVENTS_WITH_FIELDS = st.tuples(st.sampled_from(EVENTS), st.dictionaries(st.sampled_from(FIELDS), VALUES))


def seen_at(now: float) -> tuple[ServedBlocks, list[str]]:
    """Return a view at that Unix time, and what it notes."""
    notes = list[str]()
    return ServedBlocks("home h", notes.append, now=lambda: now), notes


def facts(seen: ServedBlocks) -> dict[str, list[str]]:
    return {label: [str(part) for part in parts] for label, parts in served_blocks_lines(seen, ascii_only=True)}


def test_a_phase_shows_its_bytes_rate_and_the_time_left() -> None:
    seen, _ = seen_at(12.0)
    seen.apply("s", "loading_begun", 2.0, {"phase": "read", "size_bytes": 16 * GB})
    assert facts(seen) == {"now": ["reading the checkpoint", "-" * 20], "bytes": ["0 B of 16.0 GB"]}
    seen.apply("s", "loading_progress", 12.0, {"phase": "read", "done_bytes": 4 * GB, "size_bytes": 16 * GB})
    assert facts(seen)["now"] == ["reading the checkpoint", "#" * 5 + "-" * 15]
    assert facts(seen)["bytes"] == ["4.0 GB of 16.0 GB", "400.0 MB/s", "30 s left"]
    for columns in (60, 80):
        rows = drawn(seen, columns, served_blocks_view).splitlines()
        assert any(row.rstrip().endswith("30 s left") for row in rows) and all(len(row) <= columns for row in rows)
    seen.apply("s", "loading_ended", 42.0, {"phase": "read", "size_bytes": 16 * GB, "seconds": 40.0})
    assert facts(seen)["now"] == ["starting"]


def test_without_a_terminal_a_phase_is_two_lines_until_blocks_are_served() -> None:
    seen, said = seen_at(9.0)[0], list[str]()
    seen.say = said.append

    def pass_phase(phase: str) -> None:
        seen.apply("s", "loading_begun", 1.0, {"phase": phase, "size_bytes": 3 * GB})
        for done in range(100):
            seen.apply("s", "loading_progress", 2.0, {"phase": phase, "done_bytes": done, "size_bytes": 3 * GB})
        seen.apply("s", "worker_ready", 3.0, {"device": "cpu"})
        seen.apply("s", "loading_ended", 3.0, {"phase": phase, "size_bytes": 3 * GB, "seconds": 2.04})

    pass_phase("fetch")
    assert said == ["Fetching the weights: 3.0 GB ...", "Fetched the weights: 3.0 GB in 2 s."]
    seen.apply("s", "blocks_served", 4.0, {"first": 0, "end": 2})
    pass_phase("load")
    assert len(said) == 2, "of the next commit of a run"
    seen.apply("s", "server_moves", 5.0, {"first": 2, "end": 4})
    pass_phase("load")
    assert said[2:] == ["Loading the blocks: 3.0 GB ...", "Loaded the blocks: 3.0 GB in 2 s."]


def test_served_blocks_show_who_uses_them() -> None:
    seen, notes = seen_at(100.0)
    seen.apply("s", "model_entered", 1.0, {"name": "llama", "blocks": 8, "chat_template": "Chat template: own."})
    seen.apply("s", "blocks_served", 40.0, {"first": 2, "end": 5})
    load = {"sessions": 2, "clients": 1, "waiting_tokens": 3, "pages": 2000, "pages_free": 1500, "step_ms": 4.25}
    for at, tokens in ((90.0, 1000), (94.0, 2000), (97.0, 2040), (99.5, 2100)):
        seen.apply("s", "load_changed", at, {**load, "tokens": tokens})
    shown = facts(seen)
    assert shown["now"] == ["serving 3 blocks of 8", "2 to 4"]
    assert shown["use"] == ["2 sessions", "1 client", "3 tokens waiting"]
    assert shown["speed"] == ["20.0 tokens/s", "2,100 tokens so far", "4.2 ms a step"], "100 in the last 5 s"
    assert shown["room"] == ["75 % free", "1,500 of 2,000 pages of 16 tokens"] and shown["up"] == ["60 s"]
    seen.now = lambda: 99.6 + SECONDS
    assert facts(seen)["speed"][0] == "0.0 tokens/s", "nothing has changed since"
    seen.apply("s", "server_moves", 101.0, {"first": 4, "end": 7})
    seen.apply("s", "blocks_served", 102.0, {"first": 4, "end": 7})
    assert facts(seen)["up"][1:] == ["1 move"] and facts(seen)["now"][1] == "4 to 6"
    assert notes == ["Chat template: own.", "Other blocks need this machine more: moving to 4 to 7."]


def test_a_worker_in_the_place_of_another_shows_how_far_it_is() -> None:
    seen, notes = seen_at(9.0)
    seen.apply("s", "blocks_served", 1.0, {"first": 0, "end": 2})
    seen.apply("s", "worker_died", 2.0, {"cause": "killed"})
    seen.apply("s", "loading_progress", 5.0, {"phase": "load", "done_bytes": GB, "size_bytes": 2 * GB})
    assert facts(seen)["next"] == ["loading the blocks", "#" * 10 + "-" * 10]
    seen.apply("s", "worker_ready", 6.0, {"device": "cpu"})
    assert "next" not in facts(seen) and notes == ["The worker has died (killed); a new one starts."]


def test_an_event_without_its_fields_is_passed_over() -> None:
    seen, notes = seen_at(1.0)
    for event in EVENTS:
        seen.apply("s", event, 1.0, {"round": "none", "first": None, "sessions": "many", "cause": []})
    assert notes == [] and seen.span is None and seen.loading is None


@pytest.mark.parametrize("columns", [60, 80])
@given(events=st.lists(EVENTS_WITH_FIELDS, max_size=8))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_event_ends_the_view(events: list[tuple[str, dict[str, Any]]], columns: int) -> None:
    seen, _ = seen_at(5.0)
    for event, fields in events:
        seen.apply("s", event, 1.0, fields)
    drawn(seen, columns, served_blocks_view)
