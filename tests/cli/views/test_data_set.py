"""What views show of a run's data set: a peer's own card, and the monitor's lines and column."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cli.progress.progress import Progress
from cli.terminal.screen import screen
from cli.views.card import card_lines
from cli.views.data_set import epochs_text, holders_text, progress_text
from cli.views.monitor_view import monitor_view
from swarm.status.data_set import DataSetState, MemberPages
from tests.swarm.status.test_alerts import run

ROOT = "0123456789abcdef" * 4
OPENED = {"root": ROOT, "tokens": 10_485_760, "pages": 6, "size_bytes": 20_979_712, "cache_bytes": 67_108_864}
DATA_SET = DataSetState(
    root=ROOT, tokens=10_000_000, epochs=1.25, tokens_left=7_500_000, pages=6, ranges=6, rare=2, unkept=0,
    waited_s=3.25, members={"a": MemberPages(kept=4)},
)  # fmt: skip


def own_line(progress: Progress) -> str:
    lines = dict(card_lines(progress, progress.peer("ann"), 0.0))
    return ", ".join(map(str, lines.get("data set", ())))


def test_a_card_names_the_data_set_the_cache_and_what_is_kept() -> None:
    progress = Progress("a run")
    assert own_line(progress) == ""
    progress.apply("ann", "data_set_opened", 1.0, {**OPENED, "folder": ""})
    assert own_line(progress) == "0123456789abcdef, 10,485,760 tokens, cache 67.1 MB"
    progress.apply("ann", "pages_kept", 2.0, {"pages": 3, "total": 6, "ranges": 6, "rare": 1})
    for seconds in (0.5, 2.0):
        progress.apply("ann", "samples_awaited", 3.0, {"seconds": seconds, "pages": 1})
    assert own_line(progress) == (
        "0123456789abcdef, 10,485,760 tokens, 3 of 6 pages kept, cache 67.1 MB, waited 2.5 s for pages"
    )
    (note,) = progress.notes
    assert note.endswith(
        "ann trains on the data set 0123456789abcdef of 21.0 MB; pages from other peers take at most 67.1 MB of this"
        " disk"
    )


def test_notes_tell_of_long_waits_and_missing_pages_only() -> None:
    progress = Progress("a run")
    progress.apply("ann", "data_set_opened", 1.0, {**OPENED, "folder": "/data"})
    assert "all pages here" in own_line(progress)
    progress.apply("ann", "samples_awaited", 3.0, {"seconds": 6.0, "pages": 2})
    progress.apply("ann", "page_missing", 3.0, {"page": 4, "reason": "nobody keeps it"})
    for _ in range(3):
        progress.apply("ann", "holders_unread", 3.0, {"reason": "no answer"})
    assert [note.split("  ", 1)[1] for note in progress.notes] == [
        "ann trains on the data set 0123456789abcdef of 21.0 MB, all of which is in /data",
        "ann waited 6.0 s for 2 pages of the data set",
        "ann waits for page 4 of the data set: nobody keeps it",
        "ann cannot publish which pages it keeps, or read what others do: no answer; it tries again",
    ]


def test_the_monitor_shows_progress_holders_and_pages_of_members(capsys: pytest.CaptureFixture[str]) -> None:
    console = screen(width=100)
    console.print(monitor_view(replace(run(), data_set=DATA_SET), 100))
    text = capsys.readouterr().out
    assert "data set 0123456789abcdef: epoch 2, 25.0% done, 7.5 M of 10.0 M tokens left in this one" in text
    assert "2 of 6 ranges of pages have fewer than two holders; peers waited 3.2 s for pages in ten minutes" in text
    (heading,) = [line for line in text.splitlines() if line.startswith("peer ")]
    (ann,) = [line for line in text.splitlines() if line.startswith("ann")]
    (bnn,) = [line for line in text.splitlines() if line.startswith("bnn")]
    assert "pages" in heading and "4/6" in ann and "/6" not in bnn
    console.print(monitor_view(run(), 100))
    assert "pages" not in capsys.readouterr().out


def test_texts_at_their_edges() -> None:
    assert epochs_text(0.0) == "epoch 1, 0.0% done" and epochs_text(3.0) == "epoch 4, 0.0% done"
    assert "7.5 M of 10.0 M" in progress_text(DATA_SET)
    safe = replace(DATA_SET, rare=0, waited_s=0.0)
    assert holders_text(safe) == "each of the 6 ranges of pages has two holders or more"
    assert holders_text(replace(DATA_SET, rare=1, waited_s=0.0)).startswith("1 of 6 ranges of pages has fewer")
