"""A disk that is full while a peer trains alone: the view says so, and the model is saved once there is room."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.support.peer_process import POLL_S
from tests.swarm.support.swarm_harness import open_swarm

pytestmark = [pytest.mark.soak, pytest.mark.process]

HALF_MIB = 1 << 19


@contextmanager
def a_disk(where: Path, size: str) -> Iterator[None]:
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this test mounts a tmpfs, which needs root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", where], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(HALF_MIB)):
                pass
        except OSError:
            return


async def said(log: Path, text: str) -> None:
    with trio.fail_after(120):
        while text not in log.read_text():
            await trio.sleep(POLL_S)


async def test_the_last_holder_waits_for_room_and_saves(tmp_path: Path) -> None:
    log = tmp_path / "p1.log"
    with a_disk(tmp_path / "p1", "16m"):
        async with open_swarm(tmp_path, min_peers=1) as swarm:
            peer = swarm.join("p1")
            await swarm.committed(2, peer)
            film = peer.home / "film"
            fill(film)
            await said(log, "free some space or choose another --home")
            peer.process.send_signal(signal.SIGINT)
            await said(log, "no other peer keeps the state of round")
            film.unlink()
            assert await peer.wait_exit() == 130
            assert "Saved: round" in log.read_text(), "from memory, as its events could not all be written"
            assert list((peer.home / "checkpoints").glob("*-round-*"))


async def test_the_last_peer_of_a_gossip_run_waits_for_room_and_saves(tmp_path: Path) -> None:
    log = tmp_path / "p1.log"
    with a_disk(tmp_path / "p1", "16m"):
        async with open_swarm(tmp_path, min_peers=1, outer='[outer]\nmethod = "gossip"\nsteps = 10') as swarm:
            peer = swarm.join("p1")
            await peer.wait_for("gossip_alone")
            film = peer.home / "film"
            fill(film)
            await said(log, "free some space or choose another --home")
            peer.process.send_signal(signal.SIGINT)
            await said(log, "no other peer keeps the state of round")
            film.unlink()
            assert await peer.wait_exit() == 130
            assert "Saved: round" in log.read_text()
            assert list((peer.home / "checkpoints").glob("*-round-*"))


async def test_the_operator_reads_who_has_a_full_disk_and_whose_home_was_deleted(tmp_path: Path) -> None:
    with a_disk(tmp_path / "p1", "16m"):
        async with open_swarm(tmp_path, min_peers=3) as swarm:
            _, full, gone = (swarm.join(f"p{i}") for i in range(3))
            await swarm.committed(2)
            film = full.home / "film"
            fill(film)
            told = await swarm.coordinator.wait_for("member_unsaved", lambda fields: fields["name"] == "p1")
            assert told.fields["reason"] == "cannot write its disk: No space left on device"
            await said(swarm.coordinator.log, "p1 cannot write its disk: No space left on device: it takes part in no")
            film.unlink()
            await full.wait_for("round_committed", since=full.mark())
            aside = tmp_path / "aside"
            gone.home.rename(aside)
            told = await swarm.coordinator.wait_for("member_unsaved", lambda fields: fields["name"] == "p2")
            assert told.fields["reason"] == "cannot write its disk: its home was deleted"
            gone.kill()
            shutil.rmtree(gone.home, ignore_errors=True)  # what it has begun to write there
            aside.rename(gone.home)
