"""A run of real processes that one host's many identities crowd (`tests.support.sybils`), and what must hold."""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from swarm.client.session import open_client
from swarm.run.invite import Invite
from tests.support.forking.children import open_child
from tests.swarm.support.swarm_harness import RUN_TOML, open_swarm

PER_PREFIX: Final = 8
CROWD_S: Final = 90.0
COME_S: Final = 900.0  # for all identities to come: they have the lowest priority
READ_PAUSE_S: Final = 0.5
REFUSALS: Final = {"NotAdmitted", "DialError", "ConnectionLost", "DeadlineExceeded", "Busy", "UnknownMethod"}


async def crowded_run(
    folder: Path,
    *,
    is_open: bool,
    identities: int,
    hosts: int,
    seconds: float,
    modes: Sequence[str],
    join_s: float = math.inf,
) -> dict[str, Any]:
    """Let the crowd press for that long. Every reading, by one who is there and by one who comes, shows all members; a
    newcomer joins, within `join_s` where a test looks at the clock; at most `PER_PREFIX` of the crowd are planned for
    in one round. Returns the last report."""
    toml = RUN_TOML.replace("members_per_prefix = 64", f"members_per_prefix = {PER_PREFIX}")
    toml = toml.replace('name = "harness"\nopen = true', f'name = "crowded"\nopen = {str(is_open).lower()}')
    async with open_swarm(folder, min_peers=3, steps=10, run=toml) as swarm:
        peers = [swarm.join(f"p{number}") for number in range(3)]
        await swarm.committed(1, *peers)
        invite = Invite.parse(swarm.invite.read_text())
        async with open_client(invite) as viewer:
            with trio.fail_after(300):
                while len(honest := await viewer.members()) < 4:
                    await trio.sleep(READ_PAUSE_S)
            addresses = [f"{r.addresses[0].partition('/p2p/')[0]}/p2p/{peer}" for peer, r in honest.items()]
            async with open_crowd(folder, str(invite), identities, hosts, modes) as ask:
                await ask(json.dumps(addresses))
                newcomer, readings, missed = swarm.join("late"), 0, list[str]()
                began, report = trio.current_time(), await ask("report")
                with trio.fail_after(COME_S):
                    while trio.current_time() < began + seconds or len(report["peers"]) < identities:
                        async with open_client(invite) as late_viewer:
                            for name, reader in (("early", viewer), ("late", late_viewer), ("early", viewer)):
                                asked = trio.current_time()
                                missing = honest.keys() - (await reader.members()).keys()
                                readings += 1
                                if missing:
                                    names = sorted(honest[peer].name for peer in missing)
                                    missed.append(f"{name} without {names} after {trio.current_time() - asked:.2f} s")
                        await trio.sleep(READ_PAUSE_S)
                        report = await ask("report")
                entered = await newcomer.wait_for("run_entered")
                joined = await newcomer.wait_for("round_committed")
                with trio.move_on_after(CROWD_S):  # on a busy machine the crowd needs longer than the honest peers
                    while is_open and "ask" in modes and not report["planned_max"]:
                        await trio.sleep(READ_PAUSE_S)
                        report = await ask("report")
        assert not missed, f"{len(missed)} of {readings} readings lacked members: {missed[:5]}"
        assert readings >= 5
        assert joined.at - entered.at <= join_s, f"the newcomer took {joined.at - entered.at:.1f} s"
        largest = max(int(c.fields["members"]) for peer in (*peers, newcomer) for c in peer.commits)
        assert largest <= len(peers) + 1 + PER_PREFIX
        assert report["planned_max"] <= PER_PREFIX
        if is_open and "ask" in modes:
            assert report["planned_max"], f"the crowd was not planned for: {report}"
        if not is_open:
            answered = {name for name in report["answers"] if name.rpartition(": ")[2] not in REFUSALS}
            assert not answered, f"members answered strangers: {answered}"
        swarm.check_agreement()
    return {"readings": readings, "joined_s": joined.at - entered.at, **report, "peers": len(report["peers"])}


@asynccontextmanager
async def open_crowd(
    folder: Path, invite: str, identities: int, hosts: int, modes: Sequence[str]
) -> AsyncIterator[Any]:
    """Run sybils until the block ends. Yields a function that sends them a line and returns their report."""
    command = ("tests.support.sybils", invite, str(identities), str(hosts), *modes)
    with (folder / "sybils.log").open("wb") as log:
        async with open_child(*command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}) as child:
            os.setpriority(os.PRIO_PROCESS, child.pid, 19)  # their own work must not slow the others
            yield child.ask
