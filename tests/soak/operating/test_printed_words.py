"""What a lost quorum prints is typed literally, by real processes; and a copy of the coordinator's home is started."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import trio

from swarm.run.home import Home
from tests.support.forking.command import peer_meanwhile
from tests.swarm.support.swarm_harness import RUN_TOML, WITNESS, open_swarm

pytestmark = [pytest.mark.soak, pytest.mark.process]

REQUIRED = RUN_TOML.replace("[run]", '[run]\ncoordinator = "required"', 1)
STUCK = 7


def printed(stderr: str) -> list[str]:
    """The words of the command that stands on a line of its own."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("peer regroup")]
    return shlex.split(line)[1:]


async def view_says(log: Path, pattern: str) -> str:
    """Return the first command of the coordinator's log that matches."""
    while not (found := re.findall(pattern, log.read_text())):
        await trio.sleep(0.05)
    return str(found[0])


@pytest.mark.parametrize("mode", ["witness", "required"])
async def test_the_printed_words_continue_a_run_that_lost_its_quorum(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "it's two words"
    folder.mkdir()
    async with open_swarm(folder, min_peers=3, run=WITNESS if mode == "witness" else REQUIRED) as swarm:
        p0, p1, p2 = (swarm.join(f"p{i}") for i in range(3))
        await swarm.committed(2)
        together, mark = int(p0.commits[-1].fields["term"]), p0.mark()
        for lost in (p1, p2):
            lost.kill()
        await swarm.coordinator.wait_for("quorum_lost")
        with trio.fail_after(60):
            typed = shlex.split(await view_says(swarm.coordinator.log, r"`(peer regroup [^`]+)`"))[1:]
        for _ in range(3):  # the view's words name the home, what regroup prints then names the members as well
            ended = await peer_meanwhile(*typed)
            if ended.returncode != STUCK:
                break
            typed = printed(ended.stderr)
        assert ended.returncode == 0 and "resumes from round" in ended.stdout, ended
        assert ("--without" in typed) is (mode == "witness")
        await p0.wait_for("round_committed", lambda fields: fields["term"] > together, mark)


async def test_where_no_peer_answers_yet_regroup_says_what_to_wait_for(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=2, run=WITNESS) as swarm:
        p0, p1 = swarm.join("p0"), swarm.join("p1")
        await swarm.committed(1)
        for lost in (p0, p1, swarm.coordinator):
            lost.kill()
        swarm.restart(swarm.coordinator)
        while True:
            ended = await peer_meanwhile("regroup", "--home", swarm.coordinator.home)
            if "no coordinator runs from" not in ended.stderr:
                break
        assert ended.returncode == STUCK and "no peer answers yet" in ended.stdout, ended
        assert "wait until its members are connected" in ended.stderr and "--without" not in ended.stderr
        marks = [peer.mark() for peer in (p0, p1)]
        for peer in (p0, p1):
            swarm.restart(peer)
        for peer, mark in zip((p0, p1), marks, strict=True):
            await peer.wait_for("round_committed", since=mark)
        ended = await peer_meanwhile(*printed(ended.stderr))
        assert ended.returncode == 0 and "continues by itself" in ended.stdout, ended


async def test_a_copy_of_the_coordinators_home_says_that_its_key_is_in_use(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=1) as swarm:
        swarm.join("p0")
        await swarm.committed(1)
        first, copy = swarm.coordinator.home, tmp_path / "copy"
        with trio.fail_after(120):
            while not Home(first).living_addresses():
                await trio.sleep(0.1)
        shutil.copytree(first, copy, ignore=shutil.ignore_patterns("lock"))
        refused = "another process runs with the key of this coordinator"
        for words in ((), ("--listen", "/ip4/127.0.0.1/tcp/0")):  # at its port, and at another
            ended = await peer_meanwhile("coordinate", "--home", copy, *words)
            assert ended.returncode == 5 and refused in ended.stderr, ended
        (copy / "listening").unlink()  # only the members know where the first one is
        (copy / "invite").unlink()
        ended = await peer_meanwhile("coordinate", "--home", copy, "--listen", "/ip4/127.0.0.1/tcp/0")
        assert ended.returncode == 5 and refused in ended.stderr, ended
        await swarm.coordinator.wait_for("second_process", timeout_s=20)
        before = swarm.peers["p0"].mark()
        await swarm.peers["p0"].wait_for("round_committed", since=before, timeout_s=60)
