"""Faults that only some setups have: damaged records, paused peers, a coordinator among strangers. They are drawn from
a generator of their own, so that other schedules stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from swarm.protocol.agreement import events
from tests.simulation.faults import Fault
from tests.simulation.setups import COORDINATOR, Setup

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World


def draw(setup: Setup, seed: int) -> list[Fault]:
    """Draw the rare faults of a schedule, in order."""
    random = Random(f"rare {setup.name} {seed}")
    return sorted((fault for kind in setup.rare for fault in _DRAWN[kind](setup, random)), key=lambda fault: fault.at)


def _damages(setup: Setup, random: Random) -> list[Fault]:
    found = []
    for _ in range(random.choice((1, 1, 2, 3))):
        at, peer = round(random.uniform(0.5, setup.faults_s), 3), random.choice(setup.peers)
        depth = random.choice((0.0, 0.0, 0.1, 0.5, 1.0))
        found.append(Fault(at, "damage", (peer, depth, random.choice((0.2, 1.0, 3.0)))))
    return found


def _pauses(setup: Setup, random: Random) -> list[Fault]:
    found = []
    for _ in range(random.choice((1, 1, 2, setup.members))):
        at = round(random.uniform(0.0, setup.faults_s), 3)
        found.append(Fault(at, "pause", (random.choice(setup.peers), random.choice((1.0, 4.0, 12.0)))))
    return found


def _waylays(setup: Setup, random: Random) -> list[Fault]:
    """Cut the coordinator off from all members, and leave it with those that wait to be taken in."""
    at = round(random.uniform(2.0, setup.faults_s / 2), 3)
    return [Fault(at, "cut", ((COORDINATOR, *setup.joining), False, random.choice((8.0, 20.0))))]


def _absences(setup: Setup, random: Random) -> list[Fault]:
    """Leave the coordinator with a minority for long, while its operator asks: mostly in the last seconds of the cut,
    so that a term has begun and ended no round when the others come back."""
    found, at = list[Fault](), random.uniform(2.0, 8.0)
    while at < setup.faults_s - 10.0:
        some = random.sample(setup.peers, random.randint(1, (setup.members - 1) // 2))
        seconds = random.choice((12.0, 30.0, 60.0))
        found.append(Fault(round(at, 3), "cut", ((COORDINATOR, *some), False, seconds)))
        for _ in range(random.choice((1, 1, 2, 4))):
            before_s = random.uniform(2.0, 8.0) if random.random() < 0.7 else random.uniform(0.0, seconds)
            found.append(Fault(round(at + seconds - before_s, 3), "operator", (random.random() < 0.3,)))
        at += seconds + random.uniform(2.0, 20.0)
    return found


_DRAWN: Final[dict[str, Callable[[Setup, Random], list[Fault]]]] = {
    "absence": _absences,
    "damage": _damages,
    "pause": _pauses,
    "waylay": _waylays,
}


# -- applied to a world ------------------------------------------------------------------------------------------------


def apply(world: World, fault: Fault) -> None:
    """Let this fault happen now."""
    KINDS[fault.kind](world, *fault.args)


def _damage(world: World, peer: str, depth: float, after_s: float) -> None:
    """Restart a machine on records of which one is damaged: the last one, or one that lies so deep in the log."""
    machine = world.machines[peer]
    world.crash(machine, "kept")
    entries = len(machine.disk.log or ())
    if entries and not machine.up:
        machine.disk.damage(entries - 1 - int(depth * (entries - 1)))
        world.invariants.wiped(peer)
    world.at(min(world.now + after_s, world.heals_at), None, world.restart, peer)


def _pause(world: World, peer: str, seconds: float) -> None:
    machine = world.machines[peer]
    if machine.up and not machine.paused:
        machine.paused = True
        machine.step(events.Paused(True))
        world.at(min(world.now + seconds, world.heals_at), machine, _resume, machine)


def _resume(machine: Machine) -> None:
    machine.paused = False
    machine.step(events.Paused(False))


KINDS: Final[dict[str, Callable[..., None]]] = {"damage": _damage, "pause": _pause}
