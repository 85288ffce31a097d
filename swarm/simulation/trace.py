"""Who is there when, how fast, over which link: read from a file or generated.

CSV: a header `peer,join_s,leave_s,speed,link_bytes_s`, one life a line, `leave_s` empty for whoever stays. JSON: an
object with `duration_s` and `peers`, a list of objects with the same names.
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
    """One machine from its start to its end. `speed` in work units a second; `leave_s` None: it stays."""

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
    """Read a .csv or .json trace; `ConfigError` says what is wrong with it."""
    try:
        if path.stat().st_size > TRACE_MAX_BYTES:
            raise ConfigError(f"{path} is larger than {TRACE_MAX_BYTES // 2**20} MiB; cut the trace")
        if path.suffix == ".json":
            file = msgspec.json.decode(path.read_bytes(), type=_File)
            return _checked(path, file.duration_s, file.peers)
        with path.open(newline="") as rows:
            lives = [
                msgspec.convert({name: value for name, value in row.items() if value}, Life, strict=False)
                for row in csv.DictReader(rows)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"the trace {path} is not of the documented form: {error}") from error
    ends = [life.leave_s if life.leave_s is not None else life.join_s for life in lives]
    return _checked(path, max(ends, default=0.0), lives)


def write_trace(trace: Trace, path: Path) -> None:
    """Write a .csv or .json trace that `read_trace` reads back; a CSV has no duration beyond its last event."""
    if path.suffix == ".json":
        path.write_bytes(msgspec.json.encode(_File(trace.duration_s, list(trace.lives))))
        return
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(Life.__struct_fields__)
        rows.writerows(msgspec.structs.astuple(life) for life in trace.lives)


def _checked(path: Path, duration_s: float, lives: list[Life]) -> Trace:
    for life in lives:
        positive = all(math.isfinite(x) and x > 0 for x in (life.speed, life.link_bytes_s))
        if not positive or not math.isfinite(life.join_s) or not life.end_s > life.join_s:
            raise ConfigError(f"the trace {path} has an impossible life for {life.peer}; check its times and speeds")
    if len({life.peer for life in lives}) != len(lives) or not lives or not 0 < duration_s < math.inf:
        raise ConfigError(f"the trace {path} needs a duration, at least one peer, and one line for each peer")
    return Trace(duration_s, tuple(sorted(lives, key=lambda life: (life.join_s, life.peer))))


@dataclass(frozen=True)
class SpotMarket:
    """Parameters of `spot_trace`: what we remember of the preemptible T4 instances in SWARM's section on pre-training
    (arXiv 2301.11913): 400 asked for over 32 hours, their number swinging widely, coming and going in clusters. That
    trace was never published. The values here are ours, chosen so that with six stages a run without rebalancing loses
    as much as the paper's did (about 83 percent of the optimum overall, half of it in the last hour).

    `zones` each hold some of the `wanted` instances. A zone's capacity is redrawn every `tide_s` or so (exponential)
    between `ebb` and 1 of its share, sinking over the run as if the market tightened, to `last` of it at the end. If
    capacity falls short, random instances of the zone are preempted within `burst_s`; if it grows, as many start within
    `burst_s`. Besides, each runs `life_s` at most, as one provider enforces, and fails at random at `loss_per_hour`."""

    wanted: int = 400
    hours: float = 32.0
    zones: int = 8
    tide_s: float = 3600.0
    ebb: float = 0.1
    last: float = 0.15
    burst_s: float = 180.0
    life_s: float = 24 * 3600.0
    loss_per_hour: float = 0.03
    speed_spread: float = 0.0  # standard deviation of the logarithm of speeds; T4s are alike
    link_bytes_s: float = 25e6  # 200 Mbit/s


def spot_trace(seed: int, market: SpotMarket | None = None) -> Trace:
    """A preemption trace of preemptible cloud instances; the same for the same seed and parameters."""
    market = market or SpotMarket()
    random = Random(seed)
    duration_s = market.hours * 3600.0
    lives: list[Life] = []
    for zone in range(market.zones):
        share = market.wanted // market.zones + (zone < market.wanted % market.zones)
        lives += _zone(random, market, f"z{zone}", share, duration_s)
    return Trace(duration_s, tuple(sorted(lives, key=lambda life: (life.join_s, life.peer))))


def _zone(random: Random, market: SpotMarket, name: str, share: int, duration_s: float) -> list[Life]:
    running: list[tuple[str, float, float]] = []  # peer, joined, dies of its own at
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
