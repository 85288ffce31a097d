"""Faults injected into a running pipeline, one after another, and what each cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from tests.support.peer_process import POLL_S
from tests.swarm.support.pipeline_run import STAGES, Pipeline, Replica

KILL_COSTS_S: Final = 3.0
FREEZE_COSTS_S: Final = 15.0
STRIKES_WITHIN_S: Final = 30.0
GOES_ON_WITHIN_S: Final = 60.0
RECENT_S: Final = 10.0
USUAL_S: Final = 2.0  # that the run is watched before a strike


@dataclass(frozen=True)
class Strike:
    """One injected fault. `fault`: action and point of `peer.faults`, at a replica of `stage`. If `stage` is None, at a
    peer that moves, or (`donor`) at a replica of the stage that it moves to."""

    place: str
    fault: str
    stage: int | None = None
    donor: bool = False

    @property
    def action(self) -> str:
        return self.fault.split(":")[0]

    @property
    def allowed_s(self) -> float:
        """The allowed time without progress. A killed peer hangs up; other faults are noticed by a deadline at the
        latest."""
        return KILL_COSTS_S if self.action == "kill" else FREEZE_COSTS_S

    def __str__(self) -> str:
        at = "mover" if self.stage is None else f"stage {self.stage}"
        return f"{self.place} {self.fault} at {'donor' if self.donor else at}"


@dataclass(frozen=True)
class Outcome:
    """What a fault cost. `usual_s`: the longest pause in the time before it. `trouble`: what did not hold."""

    strike: Strike
    pause_s: float
    usual_s: float
    slack: float
    trouble: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        return not self.trouble and self.pause_s <= self.strike.allowed_s * self.slack

    def __str__(self) -> str:
        verdict = "ok" if self.is_ok else "NOT OK"
        why = "".join(f"\n      {line}" for line in self.trouble)
        return f"{self.strike!s:52} pause {self.pause_s:6.2f} s (usual {self.usual_s:5.2f})  {verdict}{why}"


async def play(pipeline: Pipeline, strikes: Sequence[Strike], say: Callable[[str], object]) -> None:
    """Inject all of them; AssertionError with the table unless everything held."""
    outcomes = []
    for strike in strikes:
        outcomes.append(await one(pipeline, strike))
        say(str(outcomes[-1]))
    table = "\n".join(map(str, outcomes))
    assert all(outcome.is_ok for outcome in outcomes), f"\n{table}"


async def one(pipeline: Pipeline, strike: Strike) -> Outcome:
    """Inject one fault, watch the others go on, and restore the pipeline."""
    watched = time.time()
    await pipeline.ready(strike.stage)
    await trio.sleep(USUAL_S)
    usual_s = pipeline.pause(watched, time.time())
    before = set(pipeline.twice() + pipeline.forks())
    victim, struck = None, 0.0
    trouble: list[str] = []
    try:
        victim, struck = await strike_one(pipeline, strike)
        await pipeline.until(lambda: pipeline.advanced(struck), f"it goes on after {strike}", GOES_ON_WITHIN_S)
    except AssertionError as error:
        trouble.append(str(error).split("\n")[0])
    pause_s = pipeline.pause(struck, time.time()) if struck else 0.0
    await mend(pipeline, victim)
    trouble += [line for line in (*pipeline.twice(), *pipeline.forks()) if line not in before]
    return Outcome(strike, pause_s, usual_s, pipeline.slack, tuple(trouble[:5]))


async def strike_one(pipeline: Pipeline, strike: Strike) -> tuple[Replica, float]:
    """Return the peer that the fault hit, and when, in Unix time. Some points are reached only by the owner of a slice,
    or only by others: if one replica does not reach the point soon, the next one is armed."""
    for victim in aim(pipeline, strike):
        with trio.move_on_after(STRIKES_WITHIN_S):
            while not has_struck(victim, strike):
                await trio.sleep(POLL_S)
            return victim, time.time()
        victim.script.unlink(missing_ok=True)
    raise AssertionError(f"{strike} did not come about")


def aim(pipeline: Pipeline, strike: Strike) -> Iterator[Replica]:
    """Arm the candidates one after another. A stage's last replica is spared."""
    mover = next((replica for replica in pipeline.replicas if replica.pinned is None), None)
    if strike.stage is not None:
        at_work = pipeline.members(strike.stage, time.time() - RECENT_S) or pipeline.of(strike.stage)
        for victim in sorted(at_work, key=lambda replica: replica.peer.name, reverse=True):
            victim.arm(f"{strike.fault}:0")
            yield victim
        return
    assert mover is not None
    if not strike.donor:
        mover.arm("move:at_replica:0", f"{strike.fault}:0")
        yield mover
    for _ in range(3 if strike.donor else 0):  # of several donors any may be asked
        victim = pipeline.of((mover.stage - 1) % STAGES)[0]
        victim.arm(f"{strike.fault}:0")
        mover.arm("move:at_replica:0")
        yield victim


def has_struck(victim: Replica, strike: Strike) -> bool:
    if strike.action == "kill":
        return not victim.peer.alive
    return victim.peer.is_stopped if strike.action == "stop" else not victim.is_armed


async def mend(pipeline: Pipeline, victim: Replica | None) -> None:
    """Thaw frozen peers, and replace dead ones."""
    for replica in pipeline.replicas:
        replica.script.unlink(missing_ok=True)
    if victim is not None and victim.peer.alive:
        victim.peer.thaw()
    elif victim is not None:
        pipeline.replace(victim)
