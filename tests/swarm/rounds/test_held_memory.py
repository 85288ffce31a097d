"""Identities that hold all the payload memory they can get do not stop the rounds of an open run, nor slow them down:
the latter is for `make soak`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import trio

from tests.dht.support.open_run import guard
from tests.peer.support.honest import TIMED
from tests.peer.support.victim_child import ATTACKERS, attacker
from tests.support.forking.children import open_child
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import DrivenReplica, GroupSetting, open_driven_group

ROUNDS = 20  # of each measurement, and
FEW = 4  # where no time is taken
SLOWER_MAX = 1.2
TRIES = 5  # what else runs on this machine may spoil one

pytestmark = pytest.mark.process


@asynccontextmanager
async def open_run(folder: Path) -> AsyncIterator[list[DrivenReplica]]:
    """Two members of an open run which train without end."""
    async with open_driven_group(folder, GroupSetting(min_peers=2), timeout_s=600.0) as group:
        replicas = [await group.enter(deltas) for _ in range(2)]
        members = [group.coordinator_host.peer_id, *(replica.peer for replica in replicas)]
        for host in (group.coordinator_host, *(replica.host for replica in replicas)):
            guard(host, members=members)
            for number in range(ATTACKERS):
                host.admissions.grant(attacker(number).peer_id, "member", trusted=False)
        await group.until_round(1)
        yield replicas


async def round_s(replica: DrivenReplica, rounds: int) -> float:
    """Return the median time of the next rounds."""
    times: list[float] = []
    seen = len(replica.heads)
    with trio.fail_after(300):
        while len(times) <= rounds:
            await replica.changed.wait(1.0)
            if len(replica.heads) > seen:
                seen = len(replica.heads)
                times.append(trio.current_time())
    return median(later - earlier for earlier, later in pairwise(times))


@TIMED
async def test_rounds_go_on_while_identities_hold_all_they_can(tmp_path: Path, timed: bool) -> None:
    """Four identities announce 60 slices of 8 MiB each to both members, twice the budget, and send a byte of each."""
    tried, rounds = [], ROUNDS if timed else FEW
    async with open_run(tmp_path) as replicas:
        await round_s(replicas[0], rounds)
        for _ in range(TRIES):
            quiet = await round_s(replicas[0], rounds)
            async with AsyncExitStack() as stack:
                for replica in replicas:
                    arguments = (replica.host.addresses[0], "slices", "4", "60")
                    child = await stack.enter_async_context(open_child("tests.support.holding_child", *arguments))
                    await child.line()
                beside = await round_s(replicas[0], rounds)
            tried.append((quiet, beside))
            if not timed or beside <= SLOWER_MAX * quiet:
                return
    raise AssertionError(f"rounds beside the attack: {[(round(1e3 * a), round(1e3 * b)) for a, b in tried]} ms")
