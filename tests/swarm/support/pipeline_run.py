"""A pipeline of real `peer join` processes under repeated faults: stages, progress and checks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import psutil
import trio

from cli.progress.micro_batch_audit import AuditEntry, AuditTrail, audit
from swarm.protocol.head import Head
from swarm.training.saved_models import newest_model
from tests.simulation.histories.checks import check_histories
from tests.support.peer_process import POLL_S, Fact, PeerProcess
from tests.swarm.support.swarm_harness import Swarm, open_swarm

STAGES: Final = 3
BUSY_MAX: Final = 0.9
LOOK_BACK_S: Final = 20.0  # what is usual
RUN_TOML: Final = """
[run]
name = "struck"
open = true
rounds = {rounds}
min_peers = {min_peers}
members_per_prefix = 64

[model]
vocab_size = 256
hidden_size = HIDDEN
layers = 3
heads = 2
kv_heads = 1
intermediate_size = TWICE
max_seq_len = 64
tie_embeddings = false

[data]
seq_len = 64
source = "folder"

[inner]
lr = 1e-3
dtype = "fp32"
batch_size = BATCH
total_steps = 20000
warmup_steps = 10

[pipeline]
stages = 3
micro_batch = 4

{outer}
"""
Range = tuple[int, int]


@dataclass(eq=False)
class Replica:
    """A peer of the run. `pinned`: the stage that it was told to take; None: it chooses, and may move."""

    peer: PeerProcess
    script: Path
    pinned: int | None
    frozen: bool = False

    @property
    def workers(self) -> list[int]:
        """Return the pids of its compute workers."""
        try:
            return [child.pid for child in psutil.Process(self.peer.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @property
    def stage(self) -> int:
        """Its stage; -1: none yet."""
        members = self.peer.all("replica_opened")
        return int(members[-1].fields["stage"]) if members else -1

    @property
    def commits(self) -> list[Fact]:
        """The rounds of its present stage, merged or adopted."""
        at = self.peer.all("replica_opened")[-1].at if self.stage >= 0 else 0.0
        return [f for f in self.peer.facts if f.name in ("round_committed", "head_adopted") and f.at >= at]

    def arm(self, *scripts: str) -> None:
        """Arm these scripts: the first of them fires when its point is reached, then the next."""
        fresh = self.script.with_suffix(".fresh")
        fresh.write_text("\n".join(scripts))
        fresh.replace(self.script)

    @property
    def is_armed(self) -> bool:
        """Return whether a script has not fired yet."""
        return self.script.exists()


@dataclass
class Pipeline:
    """A run of `STAGES` stages. `replicas`: those that live; `slack`: by how much others slow it down."""

    swarm: Swarm
    slack: float = 1.0
    replicas: list[Replica] = field(default_factory=list)
    _count: int = 0

    def join(self, stage: int | None = None, *options: str) -> Replica:
        self._count += 1
        name = f"p{self._count}" + ("" if stage is None else f"-s{stage}")
        script = self.swarm.folder / f"{name}.script"
        pin = () if stage is None else ("--stage", str(stage))
        replica = Replica(self.swarm.join(name, *pin, *options, fault=f"@{script}"), script, stage)
        self.replicas.append(replica)
        return replica

    def replace(self, dead: Replica) -> Replica:
        """Start another peer in its place."""
        self.replicas.remove(dead)
        return self.join(dead.pinned)

    def of(self, stage: int) -> list[Replica]:
        return [replica for replica in self.replicas if replica.stage == stage]

    # -- waiting -----------------------------------------------------------------------------------------------------

    async def whole(self, timeout_s: float = 120.0) -> None:
        """Wait until every replica is a member of its stage's last commits, and all stages train."""
        since = time.time()
        await self.until(lambda: self._is_whole(since), "all peers are at work", timeout_s)

    async def ready(self, stage: int | None, timeout_s: float = 120.0) -> None:
        """Wait until all stages train, this one (None: each) could lose a member, and movers have moved."""
        since = time.time()

        def is_ready() -> bool:
            at_work = [len(self.members(s, since)) for s in range(STAGES)]
            movers = [replica for replica in self.replicas if replica.pinned is None]
            if stage is not None:
                return min(at_work) > 0 and at_work[stage] > 1
            return min(at_work) > 1 and bool(movers) and movers[0] in self.members(movers[0].stage, since)

        await self.until(is_ready, "enough replicas are at work", timeout_s)

    def members(self, stage: int, since: float) -> list[Replica]:
        """Return the peers that have merged in this stage since then, with all that were there."""
        fresh = [f for f in self._merges(stage) if f.at > since]
        if not fresh:
            return []
        return [r for r in self.of(stage) if any(f.name == "round_committed" and f.at > since for f in r.commits)]

    async def until(self, condition: object, what: str, timeout_s: float) -> None:
        assert callable(condition)
        with trio.move_on_after(timeout_s):
            while not condition():
                gone = [r.peer.name for r in self.replicas if not r.peer.alive and r.peer.process.returncode != -9]
                assert not gone, f"{gone} ended by themselves: {self.swarm.peers[gone[0]].transcript()}"
                await trio.sleep(2 * POLL_S)
            return
        raise AssertionError(f"waited {timeout_s:g} s in vain until {what}\n{self.swarm.transcript()}")

    def advanced(self, since: float, rounds: int = 2) -> bool:
        """Return whether each stage has merged so many rounds since then, and micro-batches went on after the first."""
        for stage in range(STAGES):
            merged = {f.fields["round"]: f.at for f in self._merges(stage) if f.at > since}
            if len(merged) < rounds:
                return False
        return bool(self.completions(since))

    def _is_whole(self, since: float) -> bool:
        for stage in range(STAGES):
            here = [replica for replica in self.replicas if replica.stage == stage]
            fresh = [f for f in self._merges(stage) if f.at > since]
            if not here or not fresh or max(fresh, key=lambda f: f.at).fields["members"] != len(here):
                return False
            for replica in here:
                if not any(f.at > since and f.name == "round_committed" for f in replica.commits):
                    return False
        return all(replica.stage >= 0 for replica in self.replicas)

    # -- what was done -----------------------------------------------------------------------------------------------

    def all_peers(self) -> Iterable[PeerProcess]:
        """Return all peers, those that are gone included."""
        return self.swarm.peers.values()

    def _merges(self, stage: int) -> Iterator[Fact]:
        for peer in self.all_peers():
            for fact in peer.all("round_committed"):
                if fact.fields["stage"] == stage:
                    yield fact

    def completions(self, since: float) -> list[float]:
        """Return when micro-batches came back to their sources."""
        times = []
        for peer in self.all_peers():
            done = 0
            for fact in peer.facts:
                if fact.name == "pipeline_progress":
                    if fact.fields["completed"] > done and fact.at > since:
                        times.append(fact.at)
                    done = int(fact.fields["completed"])
        return sorted(times)

    def completed(self, since: float, until: float) -> int:
        """Return how many micro-batches came back in that time."""
        count = 0
        for peer in self.all_peers():
            told = [f for f in peer.all("pipeline_progress") if f.at <= until]
            before = [int(f.fields["completed"]) for f in told if f.at <= since]
            after = [int(f.fields["completed"]) for f in told if f.at > since]
            for a, b in pairwise([*before[-1:], *after] if before else [0, *after]):
                count += b - a if b >= a else b  # a peer at another stage counts from 0 again
        return count

    def pause(self, since: float, until: float) -> float:
        """Return the longest time between two completions that were (or would have been) in that time."""
        times = self.completions(since - LOOK_BACK_S)
        before = [at for at in times if at <= since][-1:] or [since]
        inside = [at for at in times if since < at <= until]
        return max((b - a for a, b in pairwise([*before, *inside, until])), default=0.0)

    def twice(self) -> list[str]:
        """Return what was merged more than once, by the commits on each stage's chain."""
        found = []
        for stage in range(STAGES):
            seen: dict[int, str] = {}
            for entry in self._chain(stage):
                for first, last in (r for ranges in entry.counted for r in ranges):
                    for sample in range(first, last):
                        if sample in seen:
                            found.append(f"stage {stage}: sample {sample} in {seen[sample][:8]} and {entry.head[:8]}")
                        seen[sample] = entry.head
        return found

    def check_books(self) -> None:
        """Check, when all have left, that everything trained by the ledger of each stage's last commit was merged
        once."""
        for peer in self.all_peers():
            peer.poll()
        check_histories([peer.home for peer in (self.swarm.coordinator, *self.all_peers())])
        arrived = [replica.peer.home for replica in self.replicas if replica.peer.commits]
        model, audit_trail = newest_model(arrived), self._accounts()
        for stage, part in enumerate(model.parts):
            head = msgspec.msgpack.decode(part.head, type=Head)
            merged = audit_trail.merged(stage, model.manifest.first_head(stage).hash.hex(), head.hash.hex())
            assert merged is not None, f"no peer told of all the commits of stage {stage}"
            elsewhere = audit_trail.merged_elsewhere(stage) if stage == 0 else ()
            found = audit(merged, head.ledger, elsewhere)
            assert not found.twice and not found.lost, f"stage {stage}: {found}"
            if found.undone:
                print(f"stage 0 lost all its replicas: {found.undone} samples that others have merged")  # noqa: T201

    def forks(self) -> list[str]:
        """Return states of one stage and round that differ, and bugs."""
        hashes: dict[tuple[int, int, int], set[str]] = {}
        for peer in self.all_peers():
            for fact in peer.facts:
                if fact.name in ("round_committed", "head_adopted"):
                    place = (fact.fields["stage"], fact.fields["term"], fact.fields["round"])
                    hashes.setdefault(place, set()).add(fact.fields["state_hash"])
        bugs = [f"{peer.name}: {fact.fields}" for peer in self.all_peers() for fact in peer.all("bug")]
        return [f"forked at {place}" for place, states in hashes.items() if len(states) > 1] + bugs

    def _chain(self, stage: int) -> list[AuditEntry]:
        """Return the commits that led to the stage's last one, as far back as they are known."""
        entries = self._accounts().entries.get(stage, {})
        newest = max(self._merges(stage), key=lambda f: (f.fields["term"], f.fields["round"]), default=None)
        chain: list[AuditEntry] = []
        at = str(newest.fields["head"]) if newest is not None else ""
        while at in entries:
            chain.append(entries[at])
            at = entries[at].previous
        return chain

    def _accounts(self) -> AuditTrail:
        audit_trail = AuditTrail()
        for peer in self.all_peers():
            for fact in peer.facts:
                if fact.name in ("round_committed", "head_adopted"):
                    ranges = tuple(_ranges(text) for text in fact.fields.get("counted") or ())
                    entry = AuditEntry(str(fact.fields["head"]), str(fact.fields["previous"]), ranges)
                    audit_trail.commit(int(fact.fields["stage"]), entry)
        return audit_trail


@asynccontextmanager
async def open_pipeline(
    folder: Path, outer: str, replicas: Iterable[int | None], hidden_size: int = 32, batch_size: int = 4
) -> AsyncIterator[Pipeline]:
    """Open a run whose first rounds all these peers (by the stage that each is told to take) are in. Its accounts are
    checked at the end."""
    pinned, slack = list(replicas), slowed_by_others()
    sizes = {"HIDDEN": hidden_size, "TWICE": 2 * hidden_size, "BATCH": batch_size}
    run = reduce(lambda text, name: text.replace(name, str(sizes[name])), sizes, RUN_TOML)
    async with open_swarm(folder, min_peers=len(pinned), outer=outer, run=run) as swarm:
        pipeline = Pipeline(swarm, slack)
        for stage in pinned:
            pipeline.join(stage)
        await pipeline.whole(timeout_s=240.0)
        yield pipeline
    pipeline.check_books()


def slowed_by_others() -> float:
    """Return how many times as long as on an idle machine things take now."""
    busy = psutil.cpu_percent(interval=2.0) / 100
    return 1 / (1 - min(busy, BUSY_MAX))


def _ranges(text: str) -> tuple[Range, ...]:
    pairs = (piece.split("-") for piece in text.split(",") if piece)
    return tuple((int(first), int(last)) for first, last in pairs)
