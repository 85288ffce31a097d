"""The page that needs no server: whole at any time, written not too often, in a folder that is its own."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from peer.errors import ConfigError, ResourceError
from swarm.monitor.collector import MonitorCollector, MonitorTarget
from swarm.monitor.history.memory import History
from swarm.monitor.history.publish import Site, publish
from swarm.run.invite import Invite

RUN = "r" * 32
NAME = "</script><script>alert(1)"


def collector_of() -> MonitorCollector:
    return MonitorCollector(MonitorTarget(Invite(RUN, "authority", ())))


@asynccontextmanager
async def publishing(folder: Path, collector: MonitorCollector, failures: list[str]) -> AsyncIterator[None]:
    history = History(folder / "unopened", RUN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish, folder, collector, history, failures.append)
        await trio.testing.wait_all_tasks_blocked(0.05)
        yield
        nursery.cancel_scope.cancel()


async def settled(done: Path) -> None:
    """Wait until a file is there: it is written in a thread."""
    with trio.fail_after(60):
        while not done.exists():
            await trio.sleep(0.01)


def name_in(folder: Path) -> str:
    script = (folder / "data.js").read_text()
    assert script.startswith("barnraisePublished(") and script.endswith(");\n")
    data = json.loads(script[len("barnraisePublished(") : -3])
    assert data == json.loads((folder / "data.json").read_text()) and sorted(data["views"]) == ["all", "day", "hour"]
    return data["state"]["name"]


async def test_it_is_written_and_a_last_time_at_the_end(tmp_path: Path) -> None:
    folder, collector, failures = tmp_path / "site", collector_of(), list[str]()
    state = collector.state
    async with publishing(folder, collector, failures):
        await settled(folder / "index.html")
        assert not (folder / "data.js").exists(), "nothing is known yet"
        collector._publish(msgspec.structs.replace(state, name=NAME))
        await settled(folder / "data.json")
        for number in range(5):
            collector._publish(msgspec.structs.replace(state, name=f"later {number}"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert name_in(folder) == NAME, "it is not written again at once"
    assert name_in(folder) == "later 4" and not failures
    assert NAME not in (folder / "index.html").read_text()
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == set(), "no part of a file is left"
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o400 for path in folder.iterdir())


def test_the_folder_is_a_whole_page(tmp_path: Path) -> None:
    Site(tmp_path).begin()
    Site(tmp_path).begin()  # of the monitor before
    index = (tmp_path / "index.html").read_text()
    assert '<html lang="en" data-published>' in index and "default-src 'self'" in index
    assert {"charts.js", "uPlot.iife.min.js", "uPlot.LICENSE", "monitor.css"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_a_folder_of_others_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>Mine</h1>")
    with pytest.raises(ConfigError, match="has a page of its own"):
        Site(tmp_path).begin()
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    with pytest.raises(ResourceError, match=r"cannot be written \(.*\): free some space, or name another folder"):
        Site(tmp_path / "index.html" / "below").begin()


async def test_what_cannot_be_written_later_is_told_and_tried_again(tmp_path: Path) -> None:
    folder, collector, failures = tmp_path / "site", collector_of(), list[str]()
    async with publishing(folder, collector, failures):
        await settled(folder / "index.html")
        (folder / "data.js").mkdir()
        collector._publish(msgspec.structs.replace(collector.state, name="first"))
        with trio.fail_after(60):
            while not failures:
                await trio.sleep(0.01)
        (folder / "data.js").rmdir()
    assert "cannot be written (Is a directory)" in failures[0] and name_in(folder) == "first"
