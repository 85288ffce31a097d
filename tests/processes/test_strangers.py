"""Strangers that every peer of a closed run dials, and that dial every peer, get nothing and change nothing.

Their addresses come before the coordinator's in the invite of every peer, of `peer status`, `peer export` and of a
newcomer, so all of these call them whenever they look for peers. They answer everything (`tests.support.stranger`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trio

from swarm.run.invite import Invite
from tests.support.forking.command import peer_meanwhile
from tests.support.peer_process import PeerProcess
from tests.support.stranger_process import StrangerProcess, open_strangers
from tests.swarm.support.swarm_harness import Swarm, open_swarm

pytestmark = pytest.mark.process

DIARY: Final = b"my own private diary line, pin 114633. "
ROUNDS: Final = 3  # compared with those of a run without strangers
RUN_TOML: Final = """
[run]
name = "closed"
open = false
rounds = {rounds}
min_peers = {min_peers}
timeout_floor_s = 60.0

[model]
vocab_size = 256
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
intermediate_size = 64
max_seq_len = 64
tie_embeddings = false

[data]
seq_len = 64
source = "folder"

[inner]
lr = 4e-3
dtype = "fp32"
batch_size = 4
total_steps = 2000
warmup_steps = 10

{outer}
"""
DILOCO: Final = "[outer]\nsteps = 10"
TWO_STAGES: Final = '[outer]\nmethod = "allreduce"\nbatch = 32\n[pipeline]\nstages = 2\nactivations = "none"'


class Closed:
    """A closed run, with strangers or without."""

    def __init__(self, swarm: Swarm, strangers: StrangerProcess | None) -> None:
        self.swarm, self.strangers = swarm, strangers
        self.invite = swarm.folder / "poisoned"
        invite = Invite.parse(swarm.invite.read_text())
        self.key = invite.key
        planted = () if strangers is None else tuple(strangers.addresses.values())
        self.invite.write_text(str(msgspec.structs.replace(invite, addresses=(*planted, *invite.addresses))))

    def join(self, name: str, *options: str) -> PeerProcess:
        """Start a peer with the key that its name stands for, so that its samples are the same in every run."""
        home = self.swarm.folder / name
        home.mkdir()
        (home / "identity.key").touch(0o600)
        (home / "identity.key").write_bytes(name.encode().ljust(32, b"."))
        return self.swarm.join(name, *options, invite=self.invite)

    async def peer(self, *arguments: str) -> str:
        """Run another command with the same invite; return what it printed."""
        done = await peer_meanwhile(arguments[0], self.invite, *arguments[1:])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def secrets(self) -> list[bytes]:
        """Return what no stranger may read: the keys of the invite and of the peers' homes."""
        kept = [path.read_bytes() for path in self.swarm.folder.glob("*/identity.key")]
        assert len(kept) > 2 and len(self.key) == 32
        return [*kept, self.key]

    async def check(self) -> None:
        assert self.strangers is not None
        await self.strangers.check(self.secrets(), [DIARY[:20]])
        strangers = {report["peer"] for report in await self.strangers.reports()}
        for peer in self.swarm.processes():
            blamed = {str(fact.fields.get("peer")) for fact in peer.all("member_joined")}
            assert not blamed & strangers, f"{peer.name} takes a stranger for a member"
            assert not peer.all("bug")


@asynccontextmanager
async def closed_run(folder: Path, outer: str, min_peers: int, *, strangers: bool) -> AsyncIterator[Closed]:
    folder.mkdir()
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(open_swarm(folder, min_peers=min_peers, outer=outer, run=RUN_TOML))
        (folder / "text" / "diary.txt").write_bytes(DIARY * 20_000)
        if not strangers:
            yield Closed(swarm, None)
            return
        invite = Invite.parse(swarm.invite.read_text())
        guests = await stack.enter_async_context(open_strangers(folder / "strangers", invite.run_id))
        await guests.meet(invite.addresses[0])
        yield Closed(swarm, guests)


@pytest.mark.parametrize(
    ("members", "seconds", "compares"), [(2, 0, False), pytest.param(4, 60, True, marks=pytest.mark.soak)]
)
async def test_strangers_get_nothing_from_a_run_of_whole_models(
    tmp_path: Path, members: int, seconds: float, compares: bool
) -> None:
    """Strangers press for so many seconds. `compares`: with a run that no stranger is near. Later rounds depend on
    measured speeds, so only the first commit is the same to the bit."""
    first: list[str] = []
    losses: list[list[float]] = []
    for strangers in (False, True)[not compares :]:
        async with closed_run(tmp_path / f"strangers-{strangers}", DILOCO, members, strangers=strangers) as run:
            peers = [run.join(f"p{number}") for number in range(members)]
            await run.swarm.committed(ROUNDS, *peers, timeout_s=300)
            first.append(str(peers[0].commits[0].fields["state_hash"]))
            losses.append([float(c.fields["loss"]) for c in peers[0].commits[:ROUNDS]])
            if strangers:
                await run.check()
                await trio.sleep(seconds)
                await use_from_outside(run, tmp_path)
                await run.check()
    assert first[0] == first[-1] and losses[0][0] == losses[-1][0]
    assert all(found[-1] < found[0] for found in losses)


@pytest.mark.soak  # two minutes; a run of whole models has the same strangers
@pytest.mark.parametrize("compares", [False, True])
async def test_strangers_get_nothing_from_a_pipeline_and_its_feeder(tmp_path: Path, compares: bool) -> None:
    """`compares`: with a run that no stranger is near."""
    losses: list[list[float]] = []
    for strangers in (False, True)[not compares :]:
        async with closed_run(tmp_path / f"strangers-{strangers}", TWO_STAGES, 2, strangers=strangers) as run:
            feeder = run.join("feeder", "--role", "feeder")
            await feeder.wait_for("run_entered", timeout_s=300)
            stages = [run.join("p0", "--stage", "0"), run.join("p1", "--stage", "1")]
            await run.swarm.committed(ROUNDS, *stages, timeout_s=300)
            losses.append([float(c.fields["loss"]) for c in stages[1].commits[:ROUNDS]])
            if strangers:
                await run.check()
                await use_from_outside(run, tmp_path, "--stage", "1")
                await run.check()
                fed = [fact.fields for fact in feeder.all("text_fed")]
                assert fed, "the feeder was asked"
    assert losses[0] == pytest.approx(losses[-1], rel=1e-6)


async def use_from_outside(run: Closed, folder: Path, *options: str) -> None:
    """Look, export and join while the strangers press."""
    seen: dict[str, Any] = json.loads(await run.peer("status", "--json"))
    names = sorted(member["claims"]["name"] for member in seen["members"] if member["claims"])
    assert "helper" not in names and {"p0", "p1"} <= set(names), names
    await run.peer("export", "--out", str(folder / "model"))
    newcomer = run.join("newcomer", *options)
    await newcomer.wait_for("round_committed", timeout_s=300)
