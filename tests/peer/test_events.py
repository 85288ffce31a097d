"""The event log: when its file cannot be opened, and what others wrote in it."""

from __future__ import annotations

import gc
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.progress.event_feed import EventFeed
from cli.progress.event_tail import EventTail
from peer.errors import ResourceError
from peer.events import Event, EventLog, PenaltyLog
from peer.plain_text import SENTENCE_MAX


@contextmanager
def files_below(fd: int) -> Iterator[None]:
    """Inside the block no file can be opened under that number or a higher one, and no garbage frees a lower one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd, hard))
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def lowest_free() -> int:
    """The number that the next file to be opened gets."""
    gc.collect()  # files that other tests have left open
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_a_failed_rotation_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    fd = lowest_free()
    log = EventLog(path, rotate_bytes=100)
    with files_below(fd):
        for number in range(6):
            log.emit("tick", number=number)
    assert not path.exists(), "it was to be rotated"
    with (tmp_path / "shard").open("wb") as other:
        log.emit("tick", number=6)
        assert os.fstat(other.fileno()).st_size == 0
    log.emit("tick", number=7)
    log.close()
    assert numbers(tmp_path / "events.1.jsonl") == [*range(7)] and numbers(path) == [7], "and goes on to a new file"


def test_an_unwritable_log_is_reported(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "events.jsonl", tmp_path / "file" / "events.jsonl"):
        with pytest.raises(ResourceError, match=r"cannot be written .*--home"):
            EventLog(path)


EVIL = "\x1b]0;title\x07\x9b2J\u202e\u2028\u2029\x85\ud800\n" + '{"at":1,"event":"FORGED"}\n'


@pytest.mark.parametrize("filler", ["x", "\x1b", "\u202e", "\U0001f600", '"'], ids=ascii)
def test_what_others_wrote_stays_within_a_short_line(tmp_path: Path, filler: str) -> None:
    path = tmp_path / "events.jsonl"
    log, seen = EventLog(path), list[Event]()
    with log.subscribed(seen.append):
        log.emit("peer_penalized", peer="12D3KooW", reason=EVIL + 500_000 * filler + EVIL)
    log.close()
    line = path.read_bytes()
    assert line.isascii() and line.count(b"\n") == 1 and line.decode().strip().isprintable()
    assert len(line) <= 4096, len(line)
    ((_, name, fields),) = EventTail(path).poll()
    assert name == seen[0].name == "peer_penalized" and len(fields["reason"]) == SENTENCE_MAX
    assert fields["reason"].startswith("\x1b]0;title") and fields["reason"].endswith('"FORGED"}\n'), (
        "nothing else is lost"
    )


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("progress", loss=float("nan"), rates={"a": float("inf")}, losses=2.5)
    log.close()
    told = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (told["loss"], told["rates"], told["losses"]) == (None, {"a": None}, 2.5)


def test_penalties_are_counted_into_few_lines(tmp_path: Path) -> None:
    """9,856 bad calls of 200 strangers in 12 s: about 3 kB, and no line that a peer could have written itself."""
    path, now, heard = tmp_path / "events.jsonl", 0.0, []
    log = EventLog(path)
    penalties = PenaltyLog(log, lambda peer: peer == "member", clock=lambda: now)
    with log.subscribed(lambda event: heard.append(event)):
        for number in range(9_856):
            now = number * 12 / 9_856
            penalties.note(f"12D3KooW{number % 200:044}", 'bad \x1b[2J\r\n{"event": "forged"}')
            penalties.note("member", "slow")
    lines = path.read_text().splitlines()
    assert len(lines) == len(heard) == 20 + 2, "20 lines of strangers a minute, and one of each other peer in 10 s"
    assert path.stat().st_size < 8_000
    assert all(json.loads(line)["event"] == "peer_penalized" for line in lines)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for line in lines for char in line)
    member = [event.fields["count"] for event in heard if event.fields["peer"] == "member"]
    assert member[0] == 1 and 8_000 < int(str(member[1])) < 9_000
    log.close()


def test_penalties_of_any_number_of_peers_take_bounded_memory(tmp_path: Path) -> None:
    log = EventLog()
    penalties = PenaltyLog(log, lambda peer: False)
    for number in range(5_000):
        penalties.note(str(number), "x" * 10_000)
    assert len(penalties._peers) <= 1024


def test_a_line_comes_a_minute_after_a_flood() -> None:
    now, heard = 0.0, []
    log = EventLog()
    penalties = PenaltyLog(log, lambda peer: False, clock=lambda: now)
    with log.subscribed(lambda event: heard.append(event)):
        for number in range(100):
            penalties.note(str(number), "bad")
        now = 61.0
        penalties.note("new", "bad")
    assert len(heard) == 21


@contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    """Inside the block a file takes so many bytes and no more, as on a disk that fills up in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_no_event_from_the_view_and_tears_one_line(tmp_path: Path) -> None:
    path, feed = tmp_path / "events.jsonl", EventFeed()
    log = EventLog(path, watch=feed.take)
    log.emit("tick", number=0)
    with files_no_larger_than(2 * path.stat().st_size - 9):
        for number in range(1, 5):
            log.emit("tick", number=number)
    log.emit("tick", number=5)
    log.emit("tick", number=6)
    log.close()
    shown = list(feed.poll())
    assert [fields["number"] for _, _, fields in shown] == [*range(7)] and not list(feed.poll())
    read = list(EventTail(path).poll())
    assert [fields["number"] for _, _, fields in read] == [0, 5, 6], "what follows a torn line is whole"
    assert read[0] == shown[0], "a view shows the same from memory as from a file"


def test_no_log_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(ResourceError, match="is a link"):
        EventLog(tmp_path / "events.jsonl")
    assert (tmp_path / "victim").read_text() == "mine"
