"""The runs of `benchmarks/pipelines/swarm.py`: the model in one process, and chains of stages, seen from outside."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import psutil

from benchmarks.common.children import START_S, Child
from benchmarks.common.shaped_lan import Lan, over_link, shaped_lan
from benchmarks.pipelines.swarm_setting import Setting

ANSWER_S: Final = 180.0
WARM_UP: Final = 16  # micro-batches
WINDOWS: Final = 5  # at least as many micro-batches as are in flight; they come back in bursts
SLOWER_MAX: Final = 4.0  # than the warm-up promised, as other work on this machine may make it
CORES: Final = len(os.sched_getaffinity(0))

Figures = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """The link of every stage: Mbit/s each way, and the delay of a packet to another stage."""

    mbit: float
    delay_ms: float


@dataclass(frozen=True)
class Sample:
    """Counters since the start, at a moment when nothing is in flight. CPU seconds: `worker_s` of each stage's
    compute worker, `network_s` of its network process, `others_s` of all else on this machine, the carriers of delayed
    frames included."""

    at: float
    said_bytes: int  # by all stages' hosts: payloads and framing
    worker_s: tuple[float, ...]
    network_s: tuple[float, ...]
    others_s: float
    link_bytes: tuple[int, ...]  # of each stage, what it sent, then what it received; headers included


class Chain:
    """The stages' processes, in order."""

    def __init__(self, stages: Sequence[Child]) -> None:
        self._stages = stages

    def run(self, micro_batches: int, timeout_s: float) -> Figures:
        """Return what stage 0 says about them."""
        self._stages[0].tell({"micro_batches": micro_batches})
        return self._stages[0].read(timeout_s)

    def sample(self) -> Sample:
        processes = [psutil.Process(stage.pid) for stage in self._stages]
        networks = [_cpu_s(process) for process in processes]
        workers = [sum(_cpu_s(child) for child in process.children(recursive=True)) for process in processes]
        ours = os.sched_getaffinity(0)  # other cores do not matter here
        machine = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in ours]
        links = tuple(count for stage in self._stages for count in over_link(stage.pid))
        at = time.monotonic()
        for stage in self._stages:
            stage.tell({"report": True})
        answers = [stage.read(ANSWER_S) for stage in self._stages]
        return Sample(
            at=at,
            said_bytes=sum(answer["bytes_up"] for answer in answers),
            worker_s=tuple(workers),
            network_s=tuple(networks),
            others_s=sum(t.user + t.nice + t.system + t.steal for t in machine) - sum(workers) - sum(networks),
            link_bytes=links,
        )


@contextmanager
def open_chain(setting: Setting, stages: int, lan: Lan | None) -> Iterator[Chain]:
    """Open the stages, on loopback or on the hosts of `lan`."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        children = []
        for index in range(stages):
            ip = "127.0.0.1" if lan is None else lan.ip(index)
            place = {} if lan is None else {"place": _at_host(lan, index)}
            arguments = (setting.name, stages, index, ip, f"{folder}/{index}")
            child = Child("benchmarks.pipelines.swarm_stage", *arguments, **place)
            stack.callback(child.end)
            children.append(child)
        peers = [child.read(START_S) for child in children]
        for child in children:
            child.tell({"peers": peers})
        for child in children:
            child.read(START_S)  # it is connected, and serves
        yield Chain(children)


class Whole:
    """Processes with the whole model each, a thread each; none knows of the others."""

    def __init__(self, setting: Setting, stages: int, processes: Sequence[Child]) -> None:
        self._setting, self._stages, self._processes = setting, stages, processes

    def run(self, seconds: float) -> Figures:
        """Run all of them at the same time."""
        for process in self._processes:
            process.tell({"seconds": seconds})
        found = [process.read(seconds + ANSWER_S) for process in self._processes]
        return {
            "setting": self._setting.name,
            "stages": self._stages,
            "copies": len(found),
            "tokens_per_s": sum(one["tokens"] / one["wall_s"] for one in found),
            "cpu_us": 1e6 * sum(one["cpu_s"] for one in found) / sum(one["tokens"] for one in found),
        }


@contextmanager
def open_whole(setting: Setting, stages: int, copies: int) -> Iterator[Whole]:
    with ExitStack() as stack:
        children = [Child("benchmarks.pipelines.swarm_whole", setting.name, stages, 1) for _ in range(copies)]
        for child in children:
            stack.callback(child.end)
        for child in children:
            child.read(START_S)
        yield Whole(setting, stages, children)


def run_chain(
    setting: Setting, stages: int, link: Link | None, seconds: float, whole: Whole, repeats: int
) -> list[Figures]:
    """Measure a row of the table so many times, after `whole` each time. `swarm.py` explains the figures."""
    place = nullcontext() if link is None else shaped_lan(stages, link.mbit, link.delay_ms)
    with place as lan, open_chain(setting, stages, lan) as chain:
        warm_up = chain.run(WARM_UP, ANSWER_S)
        count = max(WARM_UP, WINDOWS * warm_up["window"], round(seconds * warm_up["steady"] / warm_up["steady_s"]))
        rows = []
        for _ in range(repeats):
            alone = whole.run(seconds / 2)
            before = chain.sample()
            done = chain.run(count, SLOWER_MAX * seconds + ANSWER_S)
            row = _row(setting, stages, link, done, count, before, chain.sample())
            rows.append(row | {"whole_cpu_us": alone["cpu_us"], "overhead": row["cpu_us"] / alone["cpu_us"] - 1})
    return rows


def _row(
    setting: Setting, stages: int, link: Link | None, done: Figures, count: int, before: Sample, after: Sample
) -> Figures:
    """Return the figures of `count` micro-batches between two samples."""
    tokens = count * setting.tokens
    tokens_per_s = done["steady"] * setting.tokens / done["steady_s"]
    workers = [(b - a) / tokens for a, b in zip(before.worker_s, after.worker_s, strict=True)]
    networks = [(b - a) / tokens for a, b in zip(before.network_s, after.network_s, strict=True)]
    cores = CORES - (after.others_s - before.others_s) / (after.at - before.at)
    allowed = {"stage": 1 / max(workers), "cores": cores / sum(workers + networks)}
    busiest = max(b - a for a, b in zip(before.link_bytes, after.link_bytes, strict=True)) / tokens
    if link is not None:
        allowed["link"] = link.mbit / 8e-6 / busiest
    limit = min(allowed, key=lambda name: allowed[name])
    return {
        "setting": setting.name,
        "stages": stages,
        "mbit": None if link is None else link.mbit,
        "delay_ms": 0.0 if link is None else link.delay_ms,
        "micro_batches": count,
        "window": done["window"],
        "retried": done["retried"],
        "tokens_per_s": tokens_per_s,
        "worker_cpu_us": [1e6 * each for each in workers],
        "network_cpu_us": [1e6 * each for each in networks],
        "cpu_us": 1e6 * (sum(workers) + sum(networks)),
        "device_busy": [each * tokens_per_s for each in workers],
        "cores_left": cores,
        "allowed": allowed,
        "limit": limit,
        "reached": tokens_per_s / allowed[limit],
        "bytes_a_hop": (after.said_bytes - before.said_bytes) / tokens / (stages - 1) / 2,
        "ideal_bytes": setting.ideal_bytes,
        "link_share": 0.0 if link is None else tokens_per_s * busiest * 8e-6 / link.mbit,
    }


def _at_host(lan: Lan, index: int) -> Any:
    return lambda *command: lan.at_host(index, *command)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
