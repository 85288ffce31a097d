"""Makes a failing schedule small: leaves out faults as long as the same invariant breaks; keeps it as a file."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.simulation.invariants import Broken
from tests.simulation.setups import SETUPS
from tests.simulation.world import World

SEEDS: Final = Path(__file__).parent / "seeds"


@dataclass(frozen=True)
class Shrunk:
    """A schedule with as few faults as were found to be enough."""

    setup: str
    seed: int
    without: tuple[int, ...]
    """Numbers of the faults that are left out."""
    what: str
    timeline: tuple[str, ...]


def replay(setup: str, seed: int, without: Collection[int] = ()) -> tuple[str, World]:
    """Run a schedule again. Return the invariant that breaks and how, "" if none does, and the world."""
    world = World(SETUPS[setup], seed, without)
    try:
        world.run()
    except Broken as error:
        return str(error), world
    except Exception as error:  # noqa: BLE001  the core must raise nothing
        return f"0 total: {type(error).__name__}: {error}", world
    return "", world


def shrink(setup: str, seed: int) -> Shrunk | None:
    """Leave out halves, quarters, .. and single faults. Return None if nothing breaks."""
    what, world = replay(setup, seed)
    if not what:
        return None
    kind = what.partition(":")[0]
    left = list(range(len(world.faults)))
    size = max(1, len(left) // 2)
    while size:
        at = 0
        while at < len(left):
            tried = left[:at] + left[at + size :]
            without = set(range(len(world.faults))) - set(tried)
            found, _ = replay(setup, seed, without)
            if found.partition(":")[0] == kind:
                left = tried
            else:
                at += size
        size //= 2
    dropped = tuple(sorted(set(range(len(world.faults))) - set(left)))
    what, small = replay(setup, seed, dropped)
    return Shrunk(setup, seed, dropped, what, tuple(small.timeline))


def keep(shrunk: Shrunk, name: str) -> Path:
    """Write a shrunk schedule to the seeds that the tests run again."""
    path = SEEDS / f"{name}.json"
    found = {"setup": shrunk.setup, "seed": shrunk.seed, "without": shrunk.without, "found": shrunk.what}
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def kept() -> list[tuple[str, str, int, tuple[int, ...]]]:
    """Return (name, setup, seed, left out) of all kept schedules."""
    found = []
    for path in sorted(SEEDS.glob("*.json")):
        entry = json.loads(path.read_text())
        found.append((path.stem, entry["setup"], entry["seed"], tuple(entry["without"])))
    return found
