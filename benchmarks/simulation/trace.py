"""Traces of machines: when each is there, its speed and its link; read from a file or generated.

CSV: a header `peer,join_s,leave_s,speed,link_bytes_s`, one life a line, `leave_s` empty for a machine that stays. JSON:
an object with `duration_s` and `peers`, a list of objects with the same names.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from peer.errors import ConfigError

TRACE_MAX_BYTES = 256 * 2**20


class Life(msgspec.Struct, frozen=True):
    """One machine from its start to its end. `speed` in work units a second; `leave_s` is None if it stays."""

    peer: str
    join_s: float
    leave_s: float | None = None
    speed: float = 1.0
    link_bytes_s: float = 25e6

    @property
    def end_s(self) -> float:
        return math.inf if self.leave_s is None else self.leave_s


class _File(msgspec.Struct):
    duration_s: float
    peers: list[Life]


@dataclass(frozen=True)
class Trace:
    """`lives` by time of joining; those that join at 0 or before are there from the start."""

    duration_s: float
    lives: tuple[Life, ...]

    def alive(self, at_s: float) -> int:
        return sum(life.join_s <= at_s < life.end_s for life in self.lives)


def read_trace(path: Path) -> Trace:
    """Read a .csv or .json trace. Raises ConfigError."""
    try:
        if path.stat().st_size > TRACE_MAX_BYTES:
            raise ConfigError(f"{path} is larger than {TRACE_MAX_BYTES // 2**20} MiB: shorten the trace")
        if path.suffix == ".json":
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            return _checked(path, file.duration_s, file.peers)
        with path.open(newline="") as rows:
            lives = [
                msgspec.convert({name: value for name, value in row.items() if value}, Life, strict=False)
                for row in csv.DictReader(rows)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"the trace {path} cannot be read ({error}): name a readable .csv or .json file") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"the trace {path} is malformed ({error}): see benchmarks/simulation/trace.py") from error
    ends = [life.leave_s if life.leave_s is not None else life.join_s for life in lives]
    return _checked(path, max(ends, default=0.0), lives)


def _checked(path: Path, duration_s: float, lives: list[Life]) -> Trace:
    for life in lives:
        positive = all(math.isfinite(x) and x > 0 for x in (life.speed, life.link_bytes_s))
        if not positive or not math.isfinite(life.join_s) or not life.end_s > life.join_s:
            raise ConfigError(f"the trace {path} has an impossible life for {life.peer}: check its times and speeds")
    if len({life.peer for life in lives}) != len(lives) or not lives or not 0 < duration_s < math.inf:
        raise ConfigError(f"the trace {path} is incomplete or repeats a peer: give a duration and one line a peer")
    return Trace(duration_s, tuple(sorted(lives, key=lambda life: (life.join_s, life.peer))))


@dataclass(frozen=True)
class SpotMarket:
    """Parameters of `spot_trace`, after the preemptible T4 instances in SWARM's section on pre-training (arXiv
    2301.11913): 400 requested for 32 hours, their number varying widely, coming and going in clusters. That trace was
    not published. The values here are ours: with six stages a run without rebalancing loses as much as the paper's (it
    reaches about 83 percent of the optimum overall, half of it in the last hour)."""

    wanted: int = 400
    """Instances requested."""
    hours: float = 32.0
    zones: int = 8
    """Each zone has some of the instances."""
    tide_s: float = 3600.0
    """Mean time (exponential) until a zone's capacity is drawn again. Instances are preempted or started to match
    it."""
    ebb: float = 0.1
    """The least share of its instances that a zone's capacity is drawn from; the largest is 1."""
    last: float = 0.15
    """Factor on capacity at the end of the run; it falls to this linearly, as in a market with rising demand."""
    burst_s: float = 180.0
    """Instances are preempted or started within so many seconds."""
    life_s: float = 24 * 3600.0
    """The longest life of an instance, which one provider enforces."""
    loss_per_hour: float = 0.03
    """Rate of random failures."""
    speed_spread: float = 0.0  # standard deviation of the logarithm of speeds; T4s are alike
    link_bytes_s: float = 25e6  # 200 Mbit/s


def spot_trace(seed: int, market: SpotMarket | None = None) -> Trace:
    """Generate a trace of preemptible cloud instances; the same for the same seed and parameters."""
    market = market or SpotMarket()
    random = Random(seed)
    duration_s = market.hours * 3600.0
    lives: list[Life] = []
    for zone in range(market.zones):
        share = market.wanted // market.zones + (zone < market.wanted % market.zones)
        lives += _zone(random, market, f"z{zone}", share, duration_s)
    return Trace(duration_s, tuple(sorted(lives, key=lambda life: (life.join_s, life.peer))))


def _zone(random: Random, market: SpotMarket, name: str, share: int, duration_s: float) -> list[Life]:
    running: list[tuple[str, float, float]] = []  # peer, joined, fails at
    lives: list[Life] = []
    made = 0

    def start(at_s: float) -> None:
        nonlocal made
        fate_s = min(random.expovariate(market.loss_per_hour / 3600.0), market.life_s * random.uniform(0.9, 1.0))
        running.append((f"{name}-{made:05d}", at_s, at_s + fate_s))
        made += 1

    def end(peer: tuple[str, float, float], at_s: float) -> None:
        speed = math.exp(random.gauss(0.0, market.speed_spread))
        leave_s = max(at_s, peer[1] + 1.0)
        lives.append(Life(peer[0], peer[1], leave_s if leave_s < duration_s else None, speed, market.link_bytes_s))

    for _ in range(share):
        start(0.0)
    now_s, capacity = 0.0, share
    next_tide_s = 3600.0 + random.expovariate(1 / market.tide_s)  # the first hour is calm
    while now_s < duration_s:
        step_s = min(market.burst_s, duration_s - now_s)
        if now_s >= next_tide_s:
            next_tide_s = now_s + random.expovariate(1 / market.tide_s)
            tight = 1.0 - (1.0 - market.last) * now_s / duration_s
            capacity = round(share * tight * random.uniform(market.ebb, 1.0))
        for peer in [p for p in running if p[2] < now_s + step_s]:
            running.remove(peer)
            end(peer, peer[2])
        while len(running) > capacity:
            peer = running.pop(random.randrange(len(running)))
            end(peer, now_s + random.uniform(0.0, step_s))
        for _ in range(capacity - len(running)):
            start(now_s + random.uniform(0.0, step_s))
        now_s += step_s
    for peer in running:
        end(peer, duration_s)
    return lives
