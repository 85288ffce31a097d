"""The harness itself: whatever a test leaves behind is ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.swarm.support.swarm_harness import Swarm, open_swarm


@pytest.mark.process
async def test_frozen_and_running_processes_are_ended(tmp_path: Path) -> None:
    left: Swarm | None = None
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with open_swarm(tmp_path) as swarm:
            left = swarm
            peer = swarm.join("p0")
            await peer.wait_for("member_joined")
            with trio.fail_after(300):
                while not swarm.group.leftovers():  # its compute worker
                    await trio.sleep(0.1)
            peer.freeze()
            await peer.wait_stopped()
            raise ZeroDivisionError("a test that fails")
    assert left is not None and not left.group.leftovers()
    assert not left.coordinator.alive and not left.peers["p0"].alive


@pytest.mark.process
async def test_a_wait_ends_with_the_process(tmp_path: Path) -> None:
    async with open_swarm(tmp_path) as swarm:
        peer = swarm.join("p0")
        with trio.fail_after(300):
            while not peer.facts:
                await peer.news.wait()
        peer.interrupt()
        with pytest.raises(AssertionError, match="it has ended with"):
            await peer.wait_for("never_said", timeout_s=10_000)
