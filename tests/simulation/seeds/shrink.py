"""Makes a failing schedule small: leaves out faults as long as the same invariant breaks; keeps it for the tests."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.simulation.campaign import run_world, world_of

KEPT: Final = Path(__file__).parent / "kept.json"


@dataclass(frozen=True)
class Shrunk:
    """A schedule with as few faults as were found to be enough."""

    setup: str
    seed: int
    without: tuple[int, ...]
    """Numbers of the faults that are left out."""
    what: str
    timeline: tuple[str, ...]


def replay(setup: str, seed: int, without: Collection[int] = ()) -> tuple[str, Any]:
    """Run a schedule again. Return the invariant that breaks and how, "" if none does, and the world."""
    world = world_of(setup, seed, without)
    return run_world(world), world


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
    entries = json.loads(KEPT.read_text())
    entries[name] = {"setup": shrunk.setup, "seed": shrunk.seed, "without": shrunk.without, "found": shrunk.what}
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return KEPT


def kept() -> list[tuple[str, str, int, tuple[int, ...]]]:
    """Return (name, setup, seed, left out) of all kept schedules."""
    entries = json.loads(KEPT.read_text())
    return [(name, entry["setup"], entry["seed"], tuple(entry["without"])) for name, entry in entries.items()]
