"""Weights as names: a state is the set of samples that were merged into it, an update those that it was made from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec
from blake3 import blake3

from optim.config import AllReduceConfig, DilocoConfig
from peer.config import InnerConfig
from peer.identity import Signed
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import genesis
from swarm.protocol.ledger import Range, count, head_of, union
from swarm.protocol.round_schedule import RoundSchedule
from tests.simulation.setups import Setup

SLICES = 4
UPDATE_BYTES = 25e6
SLOWEST, FASTEST = 100, 220  # codes of links: 0.3 MB/s and 310 MB/s
CLIENT_EVERY = 8  # contributions come with one of a peer that cannot be dialled
GENESIS = genesis("run", blake3(b"genesis").digest())
SCHEDULE = RoundSchedule(
    DilocoConfig(steps=4), InnerConfig(lr=1e-2, batch_size=2, total_steps=1000), seq_len=8, compute_s_max=10.0
)
WORK = Work(
    SCHEDULE,
    slices=lambda head: SLICES,
    exchange_s=lambda head: 4.0,
    bytes_of=lambda head: (UPDATE_BYTES, UPDATE_BYTES),
)
MICRO_BATCH = 4
COMPUTE_MAX_S = 6.0  # of a synchronous pipeline's rounds, which last until the batch is counted


@dataclass(frozen=True)
class State:
    """What has been merged into one state since the beginning."""

    samples: tuple[Range, ...] = ()
    doubled: bool = False
    """Whether some sample is in it twice."""
    forged: bool = False
    """Whether an owner's result was made up."""


class Tensors:
    """All states and updates of one world, by name."""

    def __init__(self) -> None:
        self.states: dict[bytes, State] = {GENESIS.state_hash: State()}
        self.forged: set[bytes] = set()
        """Names of results that are no merge of what was submitted."""
        self.results: dict[bytes, tuple[bytes, ...]] = {}
        """Names of the results that lead to each state."""
        self.rosters: dict[bytes, Signed] = {}
        """The roster that each state was merged by."""
        self.plans: dict[bytes, Signed] = {}
        """The plan of that roster."""
        self._merged: dict[bytes, tuple[tuple[Range, ...], bool]] = {}  # by roster

    def merge(self, key: bytes, index: int) -> bytes:
        """Return the name of an honest owner's result."""
        return blake3(key + bytes([index])).digest()

    def build(self, base: bytes, roster: OpenedRoster, results: tuple[bytes, ...], bit: bytes = b"") -> bytes:
        """Return the name of the state that follows from these results, and note what is in it. `bit`: by what another
        build's state differs."""
        name = blake3(base + b"".join(results) + bit).digest()
        if name not in self.states:
            self.results[name], self.rosters[name], self.plans[name] = results, roster.signed, roster.signed_plan
            self.note(name, base, roster, forged=not self.forged.isdisjoint(results))
        return name

    def note(self, name: bytes, base: bytes, roster: OpenedRoster, forged: bool = False) -> None:
        """Note what is in a state that was built on another one."""
        before = self.states[base]
        samples, doubled = self._samples(roster)
        whole = union((*before.samples, *samples))
        twice = doubled or count(whole) != count(before.samples) + count(samples)
        self.states[name] = State(whole, before.doubled or twice, before.forged or forged)

    def forget(self, kept: Collection[bytes], newest: int) -> None:
        """Forget states but these and so many of the newest."""
        names = {*list(self.states)[-newest:], GENESIS.state_hash, *kept}
        self.states = {name: state for name, state in self.states.items() if name in names}
        self.results = {name: results for name, results in self.results.items() if name in names}
        self.rosters = {name: roster for name, roster in self.rosters.items() if name in names}
        self.plans = {name: plan for name, plan in self.plans.items() if name in names}
        self._merged.clear()

    def _samples(self, roster: OpenedRoster) -> tuple[tuple[Range, ...], bool]:
        """Return the samples of all merged contributions, and whether two have the same one."""
        if roster.key not in self._merged:
            found: list[Range] = []
            for body in roster.merged:
                mine = roster.plan.of(body.member)
                if mine is not None:
                    found.extend(body.counted or head_of(mine.ranges, body.samples))
            whole = union(found)
            self._merged[roster.key] = (whole, count(whole) != count(found))
        return self._merged[roster.key]


def told_of_links(setup: Setup, plan: bytes, me: str) -> tuple[dict[str, bytes], bool | msgspec.UnsetType]:
    """Return what a peer says in a round that it has measured of the links of others, which differs from all others'
    words, of its own room for merging, and whether it says that it cannot be dialled."""
    if not setup.uneven:
        return {}, msgspec.UNSET
    names = {peer: blake3(plan + f"{me} {peer}".encode()).digest() for peer in setup.peers}
    rates = {peer: bytes(SLOWEST + n % (FASTEST - SLOWEST) for n in name[:2]) for peer, name in names.items()}
    return rates, blake3(plan + me.encode()).digest()[0] % CLIENT_EVERY == 0 or msgspec.UNSET


def work_of(setup: Setup) -> Work:
    """Return the rules of a group's method: local steps, or batches of a synchronous pipeline."""
    schedule = replace(SCHEDULE, by_link=setup.uneven)
    if setup.batch:
        schedule = replace(
            schedule,
            outer=AllReduceConfig(batch=setup.batch),
            compute_s_max=COMPUTE_MAX_S,
            stage=setup.stage,
            stages=2,
            micro_batch=MICRO_BATCH,
        )
    return replace(WORK, schedule=schedule, sponsors=setup.sponsors_of, is_known=setup.is_known)
