"""Many schedules over all kinds of groups: seeds, workers, coverage, and what was found."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.protocol.agreement import messages as msg
from tests.simulation.driven.lying_slices import SLICE_LIES
from tests.simulation.invariants import Broken
from tests.simulation.liars import LIES
from tests.simulation.liveness import NOT_PROMISED
from tests.simulation.setups import DRIVEN, LARGE, SETUPS
from tests.simulation.world import TAGS, World

BATCH: Final = 50  # schedules that a worker takes at once
FOUND_MAX: Final = 100
CPU_MAX_S: Final = 10.0  # for one schedule, which usually takes 0.03
DRIVEN_CPU_MAX_S: Final = 120.0  # for one of the driver, which usually takes 1
DRIVEN_EVERY: Final = 500  # schedules of the core come with one of the driver
LARGE_EVERY: Final = 1000  # schedules of the core come with one of a large group
NOT_PROMISED_MAX: Final = 0.10  # of all schedules; measured: 102 of 1,050, 25 of each of 42 kinds of groups
OF_A_SETUP_MAX: Final = 0.35  # of one kind of group; measured: 8 of 25 where weights may be lost, or long cuts end none
STANDARD_ERRORS: Final = 3.0  # by which a sample may be above these


@dataclass(frozen=True)
class Found:
    """A schedule in which something does not hold."""

    setup: str
    seed: int
    what: str


@dataclass
class Tally:
    """What a number of schedules came to."""

    schedules: int = 0
    driven: int = 0
    """Those that ran the driver."""
    heads: int = 0
    steps: int = 0
    found: list[Found] = field(default_factory=list)
    covered: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    """Schedules by setup."""
    not_promised: Counter[str] = field(default_factory=Counter)
    """Those of them that show nothing of how groups go on, since nothing was promised in the end."""

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.driven += other.driven
        self.heads += other.heads
        self.steps += other.steps
        self.found += other.found
        self.covered.update(other.covered)
        self.ran.update(other.ran)
        self.not_promised.update(other.not_promised)

    @property
    def excused(self) -> str:
        """Say of which share nothing was promised, in all and by setup."""
        each = sorted(self.not_promised, key=lambda setup: (-self.not_promised[setup] / self.ran[setup], setup))
        told = [f"{setup} {self.not_promised[setup]} of {self.ran[setup]}" for setup in each]
        share = self.not_promised.total() / max(1, self.schedules)
        return f"not promised: {share:.1%}" + (f" ({', '.join(told)})" if told else "")

    @property
    def excused_too_often(self) -> list[str]:
        """Return the setups of which nothing was promised more often than they explain, and `all` if all were."""
        many = [name for name, count in self.not_promised.items() if count > _at_most(OF_A_SETUP_MAX, self.ran[name])]
        mixed = len(self.ran) >= len(SETUPS)
        too_many = mixed and self.not_promised.total() > _at_most(NOT_PROMISED_MAX, self.schedules)
        return sorted(many) + ["all"] * too_many

    @property
    def coverage(self) -> str:
        """Say how much of what can happen has happened."""
        messages = sorted(set(TAGS.values()))
        missed = [tag for tag in messages if not self.covered[tag]]
        kinds = {kind for kind in self.covered if kind.startswith(("fault ", "crash "))}
        lies = [lie for lie in LIES if self.covered[f"lie {lie}"]]
        of_slices = [lie for lie in SLICE_LIES if self.covered[f"slice lie {lie}"]]
        told_on = [lie for lie in of_slices if self.covered[f"told on {lie}"]]
        told = f", not {', '.join(missed)}" if missed else ""
        return (
            f"{len(messages) - len(missed)} of {len(msg.Message.__args__)} message types{told};"
            f" {len(kinds)} kinds of faults; {len(lies)} of {len(LIES)} lies;"
            f" {len(of_slices)} of {len(SLICE_LIES)} about slices, {len(told_on)} of them told on"
        )


def _at_most(share: float, schedules: int) -> float:
    """Return how many of these schedules a share that holds in the long run may be, by chance."""
    return share * schedules + STANDARD_ERRORS * (share * (1.0 - share) * schedules) ** 0.5


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError("a schedule takes too much processor time: a step may never end")


@contextmanager
def processor_time_limit(seconds: float = CPU_MAX_S) -> Iterator[None]:
    """Raise TimeoutError in what takes too much processor time: a step of the core that never ends is a finding."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def world_of(name: str, seed: int, without: Collection[int] = ()) -> Any:
    """Return the world of a schedule: of the core, or of the driver, which needs torch."""
    if name not in DRIVEN:
        return World(LARGE.get(name) or SETUPS[name], seed, without)
    from tests.simulation.driven.world import DrivenWorld

    return DrivenWorld(DRIVEN[name], seed, without)


def run_world(world: Any) -> str:
    """Run a schedule. Return what does not hold, "" if all does. What the core or the driver raises counts, too."""
    try:
        with processor_time_limit(DRIVEN_CPU_MAX_S if world.setup.name in DRIVEN else CPU_MAX_S):
            world.run()
    except Broken as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
        first: Any = error
        while hasattr(first, "exceptions"):  # a group of a nursery's
            first = first.exceptions[0]
        return f"0 total: {type(first).__name__}: {first}"
    return ""


def run_one(name: str, seed: int) -> Tally:
    """Run one schedule."""
    tally, world = Tally(schedules=1, driven=int(name in DRIVEN)), world_of(name, seed)
    found = run_world(world)
    if found:
        tally.found.append(Found(name, seed, found))
    tally.heads, tally.steps, tally.covered = len(world.invariants.heads), world.steps, world.covered
    tally.ran[name] = 1
    if world.covered[NOT_PROMISED]:
        tally.not_promised[name] = 1
    return tally


def run_batch(jobs: Sequence[tuple[str, int]]) -> Tally:
    """Run some schedules in this process."""
    tally = Tally()
    for name, seed in jobs:
        tally.add(run_one(name, seed))
    return tally


def jobs_of(schedules: int, first_seed: int, names: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Return (setup, seed) of each schedule, evenly over the setups. Without names these are of the core, with one of
    the driver for every `DRIVEN_EVERY` of them, and one of a large group for every `LARGE_EVERY`."""
    if not names:
        yield from jobs_of(schedules // DRIVEN_EVERY, first_seed, tuple(DRIVEN))
        yield from jobs_of(schedules // LARGE_EVERY, first_seed, tuple(LARGE))
    chosen = names or tuple(SETUPS)
    for index in range(schedules):
        yield chosen[index % len(chosen)], first_seed + index // len(chosen)


def run_campaign(schedules: int, first_seed: int, workers: int, names: Sequence[str] = ()) -> tuple[Tally, float]:
    """Run schedules on some processes. Return what they came to, and the seconds it took."""
    jobs = list(jobs_of(schedules, first_seed, names))
    slow = [job for job in jobs if job[0] in DRIVEN]
    fast = [job for job in jobs if job[0] not in DRIVEN]
    batches = [[job] for job in slow] + [fast[at : at + BATCH] for at in range(0, len(fast), BATCH)]
    began, total = time.monotonic(), Tally()
    if workers <= 1:
        for batch in batches:
            total.add(run_batch(batch))
    else:
        with ProcessPoolExecutor(workers) as pool:
            for done in as_completed([pool.submit(run_batch, batch) for batch in batches]):
                total.add(done.result())
    total.found.sort(key=lambda found: (found.setup, found.seed))
    return total, time.monotonic() - began
