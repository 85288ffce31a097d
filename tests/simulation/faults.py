"""What goes wrong in one schedule: drawn from its seed up front, so that a failing one can be shrunk by leaving some
out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from swarm.protocol.agreement import events
from tests.simulation.setups import COORDINATOR, Setup

if TYPE_CHECKING:
    from tests.simulation.world import World

SLOWED = (
    "vote", "vote", "proposal", "promise", "prepare", "chain", "chain", "told", "ask", "chain", "results", "proposal",
    "roster", "plan", "submit", "join", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, at a time (seconds of the world)."""

    at: float
    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:7.2f} {self.kind} {' '.join(str(a) for a in self.args)}"


def draw(setup: Setup, random: Random) -> list[Fault]:
    """Draw a schedule's faults, in order."""
    found = [*_noise(random), *_joins(setup, random), *_cuts(setup, random), *_crashes(setup, random)]
    found += [*_clocks(setup, random), *_rest(setup, random)]
    if setup.restores == "undeclared":
        found = _with_all_back([*found, *_forgotten_term(setup, found, random)])
    if setup.odd:
        found = [fault for fault in found if fault.kind != "freeze" and (fault.kind != "crash" or _comes_back(fault))]
    return sorted(found, key=lambda fault: fault.at)


def _comes_back(fault: Fault) -> bool:
    """Return whether a machine that crashes votes again: one that does not, beside another build, is one too many. (A
    frozen machine may crash after the time at which it was to start again.)"""
    _, kind, _, back_s = fault.args
    return kind != "wiped" and back_s is not None


def _times(setup: Setup, random: Random, count: int) -> list[float]:
    return [round(random.uniform(0.2, setup.faults_s), 3) for _ in range(count)]


def _noise(random: Random) -> list[Fault]:
    found = []
    for kind, values in (("drop", (0, 0, 0.05, 0.1, 0.3)), ("duplicate", (0, 0, 0.05, 0.2)), ("tails", (0, 0.02, 0.1))):
        value = random.choice(values)
        if value:
            found.append(Fault(0.0, kind, (value,)))
    if random.random() < 0.5:
        found.append(Fault(0.0, "slow_types", tuple(sorted(set(random.sample(SLOWED, 2))))))
    return found


def _joins(setup: Setup, random: Random) -> list[Fault]:
    storm = setup.joiners > 3
    at = random.uniform(0.5, setup.faults_s / 2)
    return [
        Fault(round(at + random.random() if storm else random.uniform(0.0, setup.faults_s / 2), 3), "join", (peer,))
        for peer in setup.joining
    ]


def _cuts(setup: Setup, random: Random) -> list[Fault]:
    everybody = (*setup.peers, COORDINATOR, *setup.joining)
    found = []
    for at in _times(setup, random, random.choice((0, 0, 1, 1, 2, 3))):
        draw_ = random.random()
        if draw_ < 0.2:
            side = {COORDINATOR}
        elif draw_ < 0.45:
            side = {COORDINATOR, random.choice(setup.peers)}
        else:
            side = set(random.sample(everybody, random.randint(1, max(1, len(everybody) // 2))))
        one_way = random.random() < 0.3
        found.append(Fault(at, "cut", (tuple(sorted(side)), one_way, random.choice(setup.cuts_s))))
    return found


def _crashes(setup: Setup, random: Random) -> list[Fault]:
    found = []
    for at in _times(setup, random, random.choice((0, 0, 1, 2, 3, setup.members))):
        peer = random.choice(setup.peers) if random.random() < 0.75 else COORDINATOR
        kinds = ["kept", "unsynced", "prefix"]
        if peer != COORDINATOR:
            kinds.append("wiped")
        actions = random.choice((0, 0, 1, 2, 3, 5, 8, 13))
        back = random.choice((0.2, 1.0, 3.0, 8.0, None))
        found.append(Fault(at, "crash", (peer, random.choice(kinds), actions, back)))
    if random.random() < 0.1:
        at = random.uniform(0.5, setup.faults_s)
        for peer in (*setup.peers, COORDINATOR):
            found.append(Fault(at, "crash", (peer, "unsynced", 0, round(random.uniform(0.1, 3.0), 2))))
    return found


def _clocks(setup: Setup, random: Random) -> list[Fault]:
    everybody = (*setup.peers, COORDINATOR)
    found = [Fault(0.0, "rate", (peer, round(random.uniform(0.9, 1.1), 3))) for peer in everybody]
    for at in _times(setup, random, random.choice((0, 0, 1, 2))):
        found.append(Fault(at, "freeze", (random.choice(everybody), random.choice((0.5, 3.0, 10.0)))))
    for at in _times(setup, random, random.choice((0, 0, 1))):
        found.append(Fault(at, "jump", (random.choice(everybody), random.choice((5.0, 30.0, 3600.0)))))
    return found


def _rest(setup: Setup, random: Random) -> list[Fault]:
    everybody = (*setup.peers, COORDINATOR)
    found = [Fault(at, "operator", (False,)) for at in _times(setup, random, random.choice(setup.asks))]
    for at in _times(setup, random, random.choice((0, 0, 1, 2))):
        found.append(Fault(at, "suspect", tuple(random.sample(everybody, 2))))
    for at in _times(setup, random, random.choice((0, 0, 1))):
        found.append(Fault(at, "slow_peer", (random.choice(setup.peers), random.choice((2.0, 4.0, 8.0)))))
    if random.random() < 0.3:
        found.append(Fault(0.0, "slow_disks", (random.choice((0.05, 0.3)),)))
    if setup.restores:
        found.append(Fault(round(random.uniform(0.1, setup.faults_s / 2), 3), "backup", (COORDINATOR,)))
        at = round(random.uniform(setup.faults_s / 2, setup.faults_s), 3)
        found.append(Fault(at, "restore", (COORDINATOR, setup.restores == "declared", random.choice((0.2, 3.0)))))
    if setup.member_restores:
        peer = random.choice(setup.peers)
        found.append(Fault(round(random.uniform(0.1, setup.faults_s / 2), 3), "backup", (peer,)))
        found.append(Fault(round(random.uniform(setup.faults_s / 2, setup.faults_s), 3), "restore", (peer, False, 0.5)))
    return found


def _forgotten_term(setup: Setup, found: list[Fault], random: Random) -> list[Fault]:
    """Return a cut in which the operator asks for a term, after the backup of the coordinator that will forget it."""
    if random.random() < 0.5:
        return []
    at = next(fault.at for fault in found if fault.kind == "backup")
    side = (COORDINATOR, *random.sample(setup.peers, random.choice((1, 1, 2))))
    cut = Fault(at + 0.1, "cut", (side, False, 5.0))
    return [cut, Fault(at + random.uniform(1.0, 4.0), "operator", (random.random() < 0.5,))]


def _with_all_back(found: list[Fault]) -> list[Fault]:
    """Leave out what keeps a member away once the coordinator's old disk is back, or takes its disk: an undeclared one
    is tolerated while those are there that know what it has forgotten."""
    until = next(fault.at for fault in found if fault.kind == "restore")

    def is_over(fault: Fault) -> bool:
        if fault.kind == "crash":
            _, kind, _, back_s = fault.args
            return kind != "wiped" and back_s is not None and fault.at + 2.0 + back_s < until
        if fault.kind == "slow_types":  # what those say that know it would be as late as if they were away
            return not {"status", "chain"}.intersection(fault.args)
        return fault.kind not in ("cut", "freeze") or fault.at + fault.args[-1] < until

    return [fault for fault in found if is_over(fault)]


# -- applied to a world ------------------------------------------------------------------------------------------------


def apply(world: World, fault: Fault) -> None:
    """Let this fault happen now."""
    _APPLY[fault.kind](world, *fault.args)


def _cut(world: World, side: tuple[str, ...], one_way: bool, seconds: float) -> None:
    inside, names = set(side), sorted(world.machines)
    pairs = tuple(
        (a, b) for a in names for b in names if (a in inside) != (b in inside) and (not one_way or a in inside)
    )
    world.network.add_cut(pairs)
    until = min(world.now + seconds, world.heals_at)
    world.at(until, None, world.network.end_cut, pairs)
    if seconds >= 3.0:
        for a, b in pairs:
            world.at(world.now + world.random.uniform(1.0, 3.0), None, world.suspect, b, a)


def _crash(world: World, peer: str, kind: str, after_actions: int, back_s: float | None) -> None:
    machine = world.machines[peer]
    if not machine.up:
        return
    machine.dies_as = kind
    if after_actions:
        machine.lives_left = after_actions
        world.at(world.now + 1.0, machine, world.crash, machine, kind)
    else:
        world.crash(machine, kind)
    if back_s is not None:
        world.at(min(world.now + 1.0 + back_s, world.heals_at + 3.0), None, world.restart, peer)


def _restore(world: World, peer: str, declared: bool, after_s: float) -> None:
    machine = world.machines[peer]
    world.crash(machine, "kept")
    machine.restored = machine.disk.restore() or machine.restored
    world.invariants.put_back(machine)
    world.at(world.now + after_s, None, world.restart, peer, declared)


def _rate(world: World, peer: str, rate: float) -> None:
    world.machines[peer].rate = rate


def _freeze(world: World, peer: str, seconds: float) -> None:
    world.machines[peer].frozen_until = min(world.now + seconds, world.heals_at)


def _slow_peer(world: World, peer: str, factor: float) -> None:
    world.machines[peer].train_s *= factor
    world.machines[peer].fetch_s *= factor


def _slow_disks(world: World, sync_s: float) -> None:
    for name in sorted(world.machines):
        world.machines[name].sync_s = sync_s * world.random.random()


def _operator(world: World, undo: bool) -> None:
    world.asked_at = world.now
    world.machines[COORDINATOR].step(events.RegroupRequested(undo=undo))


def _suspect(world: World, suspected: str, by: str) -> None:
    world.suspect(by, suspected, False)


def _slow_types(world: World, *tags: str) -> None:
    world.network.slow = frozenset(tags)


_APPLY: dict[str, Callable[..., None]] = {
    "drop": lambda world, value: setattr(world.network, "drop", value),
    "duplicate": lambda world, value: setattr(world.network, "duplicate", value),
    "tails": lambda world, value: setattr(world.network, "tails", value),
    "slow_types": _slow_types,
    "join": lambda world, peer: world.restart(peer),
    "cut": _cut,
    "crash": _crash,
    "rate": _rate,
    "freeze": _freeze,
    "jump": lambda world, peer, seconds: world.machines[peer].jump(seconds),
    "operator": _operator,
    "suspect": _suspect,
    "slow_peer": _slow_peer,
    "slow_disks": _slow_disks,
    "backup": lambda world, peer: world.machines[peer].disk.save_backup(),
    "restore": _restore,
}
