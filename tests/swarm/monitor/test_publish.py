"""The page that needs no server: whole at any time, written not too often, in a folder that is its own."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from peer.errors import ConfigError, ResourceError
from swarm.monitor.collector import MonitorCollector
from swarm.monitor.history.memory import History, open_history
from swarm.monitor.history.publish import Site, publish
from swarm.run.invite import Invite
from swarm.status.head_chain import HeadChain
from tests.swarm.status.scenes import finite, heads_of, shown

RUN = "r" * 32
NAME = "</script><script>alert(1)"


def collector_of() -> MonitorCollector:
    return MonitorCollector(Invite(RUN, "authority", ()))


@asynccontextmanager
async def publishing(
    folder: Path, collector: MonitorCollector, failures: list[str], history: History | None = None
) -> AsyncIterator[None]:
    history = history or History(folder / "unopened", RUN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish, folder, collector, history, failures.append)
        await trio.testing.wait_all_tasks_blocked(0.05)
        yield
        nursery.cancel_scope.cancel()


async def settled(done: Path) -> None:
    """Wait until a file is there: it is written in a thread."""
    with trio.fail_after(300):
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
        await collector._publish(msgspec.structs.replace(state, name=NAME))
        await settled(folder / "data.json")
        for number in range(5):
            await collector._publish(msgspec.structs.replace(state, name=f"later {number}"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert name_in(folder) == NAME, "it is not written again at once"
    assert name_in(folder) == "later 4" and not failures
    assert NAME not in (folder / "index.html").read_text()
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == set(), "no part of a file is left"
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o400 for path in folder.iterdir())


async def test_a_round_that_a_state_tells_of_is_in_the_history_beside_it(tmp_path: Path) -> None:
    """Also where the monitor ends as soon as it has shown that state, a moment after the page was written."""
    folder, heads = tmp_path / "site", heads_of(finite(), "abc", 2)
    async with open_history(tmp_path / "a.db", RUN) as history:
        collector = MonitorCollector(Invite(RUN, "authority", ()), remember=history.note)
        chain = HeadChain()
        collector.chains = [chain]
        async with publishing(folder, collector, [], history):
            for head in heads:
                chain.advance(head, [], time.time())
                if not head.previous:
                    chain.extend_back([])
                await collector._publish(shown(finite(), {}, [chain], "abc"))
                if head.round == 1:
                    await settled(folder / "data.json")
    data = json.loads((folder / "data.json").read_text())
    assert data["state"]["rounds"][0]["round"] == 2 and data["views"]["all"]["rounds"]["round"] == [1.0, 2.0]


def test_the_folder_is_a_whole_page(tmp_path: Path) -> None:
    Site(tmp_path).begin()
    Site(tmp_path).begin()  # of the monitor before
    index = (tmp_path / "index.html").read_text()
    assert '<html lang="en" data-published>' in index and "default-src 'self'" in index
    assert {"charts.js", "uPlot.iife.min.js", "uPlot.LICENSE", "monitor.css"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_a_folder_of_others_stays_as_it_is(tmp_path: Path) -> None:
    for name in ("index.html", "chapter-1.txt", ".hidden"):
        (tmp_path / name).write_text("<h1>Mine</h1>")
        with pytest.raises(ConfigError, match="holds other files than such a page: name an empty folder"):
            Site(tmp_path).begin()
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).rename(tmp_path.with_name(f"{tmp_path.name}{name}"))
    with pytest.raises(ResourceError, match=r"cannot be written \(.*\): free some space, or name another folder"):
        Site(tmp_path.with_name(f"{tmp_path.name}index.html") / "below").begin()


async def test_what_cannot_be_written_later_is_told_and_tried_again(tmp_path: Path) -> None:
    folder, collector, failures = tmp_path / "site", collector_of(), list[str]()
    async with publishing(folder, collector, failures):
        await settled(folder / "index.html")
        (folder / "data.js").mkdir()
        await collector._publish(msgspec.structs.replace(collector.state, name="first"))
        with trio.fail_after(300):
            while not failures:
                await trio.sleep(0.01)
        (folder / "data.js").rmdir()
    assert "cannot be written (Is a directory)" in failures[0] and name_in(folder) == "first"
