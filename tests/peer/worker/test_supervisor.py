"""A group of two worker processes: addressing, loss of one rank, and refused starts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from peer.errors import ConfigError, WorkerError
from peer.footprint.layout import Layout
from tests.peer.support.echo_worker import EchoGroup
from tests.peer.support.worker_harness import Log, worker_config

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="process supervision is tested through Linux's /proc"),
]
Reported = list[int]


@pytest.fixture(autouse=True)
def _echo_workers(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.worker.process._MODULE", "tests.peer.support.echo_worker")


async def test_a_lost_rank_replaces_the_whole_group(tmp_path: Path) -> None:
    log = Log()
    async with EchoGroup.open(worker_config(tmp_path, tmp_path, events=log, ranks=Layout(replicate=2))) as group:
        first = group.worker_pids
        assert await group.ask_each(group.who(), Reported) == [[0, 2, first[0]], [1, 2, first[1]]]
        assert await group.ask(group.who(), Reported) == [0, 2, first[0]]
        assert await group.ask(group.who(), Reported, rank=1) == [1, 2, first[1]]
        assert {path.name for path in tmp_path.glob("*.log")} == {"worker.log", "worker-1.log"}

        errors: list[str] = []

        async def wait(rank: int | None) -> None:
            with pytest.raises(WorkerError) as caught:
                await group.ask(group.wait(), object, rank)
            errors.append(str(caught.value))
            assert group.generation == 1

        with trio.fail_after(500):  # the start of processes
            async with trio.open_nursery() as nursery:
                nursery.start_soon(log.wait_for, "worker_ready")
                for rank in (0, None):  # the commands of the live rank are lost, too
                    nursery.start_soon(wait, rank)
                await trio.testing.wait_all_tasks_blocked()
                os.kill(first[1], signal.SIGKILL)
            assert len(errors) == 2 and all("killed by SIGKILL" in error for error in errors)
            reports = await group.ask_each(group.who(), Reported)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in first)
        assert [report[2] for report in reports] == list(group.worker_pids) and not {*first} & {*group.worker_pids}

        command = group.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(group.ask, command, object)
            await trio.testing.wait_all_tasks_blocked()
            await group.cancel(command.id)


async def test_a_rank_that_does_not_load_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1 does not load"):
        async with EchoGroup.open(worker_config(tmp_path, tmp_path, ranks=Layout(replicate=2), seed=2)):
            pass
