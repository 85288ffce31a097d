"""What a monitor remembers: gaps, heads that are completed, files that it refuses or cannot use, and its size."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peer.errors import ConfigError
from swarm.monitor.history.history_file import FINE_S, VERSION
from swarm.monitor.history.memory import History, open_history
from swarm.protocol.head import Head
from swarm.status.head_chain import HeadChain
from swarm.status.state import LossPoint, MonitorState
from tests.swarm.status.scenes import NOW, finite, heads_of, model_shown, next_head, peer, server, shown

RUN = "r" * 32


def state_of(heads: Sequence[Head], members: str = "abc", **changes: object) -> MonitorState:
    chain = HeadChain()
    chain.advance(heads[-1], heads[:-1], NOW)
    records = {name: peer(name=name, loss=2.0, round=heads[-1].round) for name in members}
    return msgspec.structs.replace(shown(finite(), records, [chain], members), **changes)


async def seen(history: History, heads: Sequence[Head], start: float = NOW, every_s: float = 10.0) -> HeadChain:
    """Note a reading for each of the heads, as a monitor that looks while they come. Return its chain."""
    chain = HeadChain()
    for place, head in enumerate(heads):
        at = start + every_s * place
        chain.advance(head, [], at)
        if not head.previous:
            chain.extend_back([])
        point = LossPoint(round=head.round, train=3.0 - head.round / 100, peers=3, held_out=None)
        await history.note(state_of(heads[: place + 1], at=at, loss=(point,)), [chain])
    return chain


def open_at(path: Path, now: float) -> History:
    return History(path, RUN, clock=lambda: now)


async def test_a_run_is_remembered(tmp_path: Path) -> None:
    heads = heads_of(finite(), "abc", 9)
    history = open_at(tmp_path / "new" / "a.db", NOW + 200)
    await history.open()
    await seen(history, heads)
    view = await history.view("hour")
    assert view.rounds["round"] == list(range(1, 10)) and view.rounds["seconds"] == [10.0] * 9
    assert view.rounds["tokens_s"] == [100.0] * 9 and view.rounds["merged"] == [3.0] * 9
    assert view.losses["round"][-1] == 9 and view.losses["train"][-1] == pytest.approx(2.91)
    assert view.samples["at"] == [NOW + FINE_S * place for place in range(11)]
    assert view.samples["members"][1:] == [3.0] * 10 and view.samples["loss"] == [2.0] * 11
    assert view.since == NOW - 1, "a young run fills its chart"
    assert "sessions" not in view.samples and not view.trouble
    assert (await history.view("all")).rounds == view.rounds and (await history.view("all")).samples == view.samples
    assert (await history.view("day")).samples["at"][-1] == pytest.approx(NOW + 100, abs=240)
    await history.close()


async def test_a_monitor_that_was_killed_completes_the_heads_and_shows_the_gap(tmp_path: Path) -> None:
    heads, path = heads_of(finite(), "abc", 40), tmp_path / "a.db"
    history = open_at(path, NOW)
    await history.open()
    await seen(history, heads[:10])
    file: Any = history._file
    os.close(file._lock)  # as a death leaves it: nothing is written back
    again = open_at(path, NOW + 900)
    await again.open()
    chain = await seen(again, heads[30:], NOW + 600)
    assert (await again.view("hour")).rounds["round"][-1] == 40
    chain.extend_back(heads[:30])
    chain.reaches_back = True
    await again.note(state_of(heads, at=NOW + 720), [chain])
    again._views.clear()
    view = await again.view("hour")
    assert view.rounds["round"] == list(range(1, 41)), "members told the rounds between"
    seconds = dict(zip(view.rounds["round"], view.rounds["seconds"], strict=True))
    assert seconds[8] == 10.0 and seconds[20] is None and seconds[35] == 10.0
    assert seconds[29] is None, "when the first head came that it met is not known"
    [gap] = [place for place, value in enumerate(view.samples["members"]) if value is None and place > 1]
    before, after = view.samples["at"][gap - 1], view.samples["at"][gap + 1]
    assert before is not None and after is not None and after - before == 510
    await again.close()


async def test_rounds_that_came_at_once_share_their_time_and_lost_ones_are_a_gap(tmp_path: Path) -> None:
    heads = heads_of(finite(), "abc", 30)
    history = open_at(tmp_path / "a.db", NOW + 300)
    await history.open()
    chain = await seen(history, heads[:4])
    chain.advance(heads[7], heads[4:7], NOW + 70)
    await history.note(state_of(heads[:8], at=NOW + 70), [chain])
    chain.advance(heads[20], heads[19:20], NOW + 200)
    chain.reaches_back = True
    await history.note(state_of(heads[:21], at=NOW + 200), [chain])
    rounds = (await history.view("hour")).rounds
    assert rounds["seconds"][2:6] == [10.0] * 4
    assert rounds["merged"][rounds["round"].index(6) + 1] is None
    await history.close()


async def test_undone_rounds_are_no_rounds(tmp_path: Path) -> None:
    heads = heads_of(finite(), "abc", 6)
    history = open_at(tmp_path / "a.db", NOW + 300)
    await history.open()
    chain = await seen(history, heads)
    start = msgspec.structs.replace(heads[4], term=5, previous=heads[4].hash, attempt=-1)
    for place, head in enumerate((start, next_head(start, absent="c"))):
        chain.advance(head, [heads[3], heads[4]] if place == 0 else [], NOW + 100 + 10 * place)
        await history.note(state_of([head], at=NOW + 100), [chain])
    rounds = (await history.view("all")).rounds
    assert rounds["round"] == [1, 2, 3, 4] and rounds["merged"] == [3.0, 3.0, 3.0, 2.0]
    await history.close()


async def test_readings_that_failed_are_not_remembered_and_a_model_is(tmp_path: Path) -> None:
    history = open_at(tmp_path / "a.db", NOW + 10)
    await history.open()
    state = model_shown({"a": server(0, 3, sessions=4)})
    watch = msgspec.structs.replace(state.monitor, failure="nobody answers")
    await history.note(msgspec.structs.replace(state, monitor=watch), [])
    await history.note(msgspec.structs.replace(state, at=NOW), [])
    samples = (await history.view("day")).samples
    assert (samples["sessions"], samples["unserved"], samples["peers"]) == ([4.0], [1.0], [1.0])
    await history.close()


def pragma(path: Path, statement: str) -> None:
    database = sqlite3.connect(path)
    database.execute(statement)
    database.commit()
    database.close()


async def test_files_of_others_are_refused_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with open_history(path, RUN):
        with pytest.raises(ConfigError, match="another monitor"):
            await History(path, RUN).open()
    with pytest.raises(ConfigError, match="holds the history of 'rrrr"):
        async with open_history(path, "s" * 32):
            pass
    pragma(path, f"PRAGMA user_version = {VERSION + 1}")
    content = path.read_bytes()
    with pytest.raises(ConfigError, match=f"of version {VERSION + 1}, and this program knows up to {VERSION}: update"):
        async with open_history(path, RUN):
            pass
    other = tmp_path / "other.db"
    pragma(other, "CREATE TABLE food (name TEXT)")
    with pytest.raises(ConfigError, match="something else"):
        async with open_history(other, RUN):
            pass
    assert path.read_bytes() == content


async def test_a_damaged_file_is_told_and_the_monitor_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"no database at all, " * 100)
    async with open_history(path, RUN) as history:
        assert "is damaged (file is not a database): remove it" in history.trouble
        await history.note(state_of(heads_of(finite(), "abc", 2)), [])
        view = await history.view("hour")
        assert view.trouble == history.trouble and not view.samples
    async with open_history(path / "b.db", RUN) as history:
        assert "nothing is remembered now (File exists)" in history.trouble
    assert str(tmp_path) not in history.trouble, "many may read the page"


async def test_a_file_that_is_damaged_later(tmp_path: Path) -> None:
    path, heads = tmp_path / "a.db", heads_of(finite(), "abc", 3)
    async with open_history(path, RUN) as history:
        await seen(history, heads)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:4096] + b"\xee" * (size - 4096))
    async with open_history(path, RUN) as history:
        await history.note(state_of(heads, at=NOW + 50), [])
        assert "is damaged" in history.trouble
        assert "is damaged" in (await history.view("hour")).trouble


async def test_a_full_disk_is_told_and_writing_goes_on_when_there_is_room(tmp_path: Path) -> None:
    heads = heads_of(finite(), "abc", 200)
    async with open_history(tmp_path / "a.db", RUN) as history:
        history._clock = lambda: NOW + 3000
        database: Any = history._file._database
        [(pages,)] = database.execute("PRAGMA page_count").fetchall()
        database.execute(f"PRAGMA max_page_count = {pages}")
        chain = await seen(history, heads)
        assert "nothing is remembered now (database or disk is full): free some space" in history.trouble
        assert not database.in_transaction
        database.execute("PRAGMA max_page_count = 100000")
        await history.note(state_of(heads, at=NOW + 2100), [chain])
        assert not history.trouble
        assert (await history.view("all")).rounds["round"] == list(range(1, 201)), "no round is forgotten"


def samples_in(path: Path) -> list[tuple[int, int]]:
    database = sqlite3.connect(path)
    found = database.execute("SELECT step, at FROM sample ORDER BY step, at").fetchall()
    database.close()
    return found


async def test_fine_samples_last_two_days_and_minutes_thirty(tmp_path: Path) -> None:
    state = state_of(heads_of(finite(), "abc", 2))
    path = tmp_path / "a.db"
    async with open_history(path, RUN) as history:
        for days in (0.0, 1.0, 2.5, 31.0):
            await history.note(msgspec.structs.replace(state, at=NOW + 86400 * days), [])
    kept = [(step, (at - NOW) / 86400) for step, at in samples_in(path)]
    assert kept == [(10, 31.0), (60, 1.0), (60, 2.5), (60, 31.0)]


async def test_what_an_hour_of_fifty_peers_takes(tmp_path: Path) -> None:
    """At most 10 MB a day. A reading each 5 s, a round each 20 s, a loss of each round."""
    names = [f"12D3KooW{place:044d}" for place in range(50)]
    heads, path = heads_of(finite(), names, 180), tmp_path / "a.db"
    records = {name: peer(name=name, loss=2.0, round=1) for name in names}
    chain = HeadChain()
    state = shown(finite(), records, [HeadChain()], names[:1])
    async with open_history(path, RUN) as history:
        for reading in range(720):
            at = NOW + 5 * reading
            if reading % 4 == 0:
                chain.advance(heads[reading // 4], [], at)
            point = LossPoint(round=chain.heads[-1].round, train=2.0 + reading, peers=50, held_out=None)
            await history.note(msgspec.structs.replace(state, at=at, loss=(point,)), [chain])
    assert len(samples_in(path)) == 360 + 60
    assert path.stat().st_size * 24 <= 10e6
