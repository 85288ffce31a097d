"""A run's demands on a machine, and its pace there. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec
from msgspec.structs import replace as changed

from optim.bundles import BUNDLES_MAX, Bundles
from optim.wire_sizes import slices_of
from peer.config import MasterType
from peer.errors import ConfigError
from peer.footprint.host import written_in_a_day
from peer.footprint.layout import Layout, check_split
from peer.footprint.pace import WAITING, Pace, steps_in
from peer.footprint.step_size import SMALLEST, sized, step_that_fits
from peer.footprint.work import training_work
from peer.footprint.workload import DeviceKind, Footprint, Recompute, Workload
from swarm.placement.costs import USUAL_PEERS, RunShape, cut, of_each
from swarm.protocol.leader_bytes import leader_bytes
from swarm.protocol.roster_room import peers_that_fit

TOKENS_A_PARAMETER: Final = 20
"""Of a compute-optimal run (arXiv 2203.15556)."""
_STAGES_TRIED: Final = 64
_DEVICES_TRIED: Final = (2, 4, 8)


@dataclass(frozen=True)
class Machine:
    """One machine of a run. On a CPU `device_bytes` has no meaning: all lies in its memory."""

    device: DeviceKind
    device_bytes: float
    host_bytes: float
    flops: float
    """FLOP/s that training keeps up."""
    link_bits_s: float
    narrow: bool
    devices: int = 1
    """Devices of one peer, all alike. `device_bytes` and, of GPUs, `flops` are those of one."""
    layout: str = "auto"
    """How they share the model, as `Layout.parse` reads it."""
    weights: MasterType = "fp32"
    """How a device holds the weights."""


class StageNeed(msgspec.Struct, frozen=True):
    """Bytes that one stage takes, item by item."""

    stage: int
    parameters: int
    device: dict[str, float]
    host: dict[str, float]
    disk: dict[str, float]
    device_bytes: float
    host_bytes: float
    """The machine's memory: with the device's where there is no GPU."""
    disk_bytes: float
    fits: bool
    state: Literal["memory", "disk"]
    """Where the run's states lie by default (`peer join --state`)."""


class MachinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that `peer plan` says."""

    parameters: int
    device: DeviceKind
    devices: int
    layout: str
    """How the peer's devices share the model."""
    device_memory_bytes: float
    """Of each device."""
    host_memory_bytes: float
    flops: float
    link_bits_s: float
    peers: int
    fits: bool
    stages: list[StageNeed]
    micro_batch: int
    """Sequences on the device at a time: of a pipeline as the run has them, else those that fit, of at most the step's;
    1 if not even one does."""
    recompute: Recompute
    """The part computed a second time to make them fit."""
    step_s: float
    steps: int
    steps_wanted: int
    exchange_bytes: float
    exchange_s: float
    waiting_share: float
    round_s: float
    rounds_a_day: float
    tokens: float
    days: float
    traffic_a_day: float
    written_a_day: float
    """About the bytes that the disk takes."""
    group_most: int
    """About how many peers of one stage a round can merge, which `max_peers` may not exceed; 0 if rounds are each
    peer's own."""
    leader_peers: int
    """The size of the group whose leader is counted: `max_peers`, or `group_most` if that is less; 0 where rounds are
    each peer's own."""
    leader_bytes: float
    """The bytes that this leader sends in a round besides its exchange."""
    leader_bits_s: float
    """`leader_bytes` over the round's time, bits a second."""
    bottleneck: str
    advice: list[str]


def plan_for(
    shape: RunShape,
    machine: Machine,
    peers: int,
    tokens: float | None = None,
    compute_s_max: float = 3600.0,
    max_peers: int = 64,
) -> MachinePlan:
    """Return the run's demands on `machine`, and its pace with that many `peers` like it. `tokens`: to train on; None
    for as many as are worth it. `compute_s_max` and `max_peers`: the run's limits of a round and a group."""
    stages = len(shape.cuts)
    works, needs = _demands(shape, machine, peers)
    parameters = sum(work.parameters for work in works)
    worst = max(works, key=lambda work: training_work(shape.model, work.blocks, shape.data.seq_len))
    pace = _pace(shape, machine, worst)
    tokens = TOKENS_A_PARAMETER * parameters if tokens is None else tokens
    fits = all(need.fits for need in needs)
    most = min(_group_most(work) for work in works)
    led = min(max_peers, most)
    sent = max(leader_bytes(led, _bundles(work), pace.round_s, work.is_stage) for work in works) if led else 0.0
    return MachinePlan(
        parameters=parameters,
        device=machine.device,
        devices=machine.devices,
        layout=str(works[0].layout),
        device_memory_bytes=machine.device_bytes,
        host_memory_bytes=machine.host_bytes,
        flops=machine.flops,
        link_bits_s=machine.link_bits_s,
        peers=peers,
        fits=fits,
        stages=needs,
        micro_batch=works[0].sequences,
        recompute=works[0].recompute,
        step_s=pace.step_s,
        steps=pace.steps,
        steps_wanted=pace.steps_wanted,
        exchange_bytes=pace.exchange_bytes,
        exchange_s=pace.exchange_s,
        waiting_share=pace.waiting_share,
        round_s=pace.round_s,
        rounds_a_day=pace.rounds_a_day,
        tokens=tokens,
        days=pace.days(tokens),
        traffic_a_day=pace.traffic_a_day,
        written_a_day=written_in_a_day(worst, pace.rounds_a_day),
        group_most=most,
        leader_peers=led,
        leader_bytes=sent,
        leader_bits_s=8 * sent / pace.round_s,
        bottleneck=_bottleneck(machine, needs, pace),
        advice=[
            *_room(shape, machine, needs),
            *_speed(pace, compute_s_max, stages, machine.devices),
            *_leading(pace, led, sent),
        ],
    )


def has_room(shape: RunShape, machine: Machine, peers: int) -> bool:
    """Return whether `machine` has room for any stage of the run: the `fits` of `plan_for`, without pace and advice."""
    return all(need.fits for need in _demands(shape, machine, peers)[1])


def _demands(shape: RunShape, machine: Machine, peers: int) -> tuple[list[Workload], list[StageNeed]]:
    """Return the work of each stage, and its demands."""
    group = max(1, peers // len(shape.cuts))
    layout = _layout(shape, machine, group)
    works = [_work(shape, machine, stage, group, layout) for stage in range(len(shape.cuts))]
    return works, [_need(shape, machine, work, stage) for stage, work in enumerate(works)]


def _group_most(work: Workload) -> int:
    if not work.exchange.is_common:
        return 0
    return peers_that_fit(_bundles(work), work.is_stage)


def _bundles(work: Workload) -> int:
    return Bundles.at_most(BUNDLES_MAX, slices_of(work.parameters / work.exchange.fragments)).count


def check_layout(shape: RunShape, layout: Layout, weights: MasterType = "fp32") -> None:
    """Raise ConfigError for a layout, and a way to hold the weights, that the run's model does not allow."""
    if weights == "split":
        check_split(layout, shape.model, shape.inner.optimizer, shape.inner.dtype == "fp16", len(shape.cuts) > 1)
    if len(shape.cuts) > 1:
        layout.check_stage(shape.model.adapter is not None)
    layout.check(shape.model, shape.inner.optimizer, shape.data.seq_len, shape.base)


def _layout(shape: RunShape, machine: Machine, peers: int) -> Layout:
    """Return how the devices of `machine` share the model. Raises ConfigError for what does not suit it."""

    def fits(layout: Layout) -> bool:
        works = (_work(shape, machine, stage, peers, layout) for stage in range(len(shape.cuts)))
        return all(_fits_device(machine, shape.footprint(work)) for work in works)

    layout = Layout.parse(machine.layout, machine.devices, fits)
    check_layout(shape, layout)
    return layout


def _work(shape: RunShape, machine: Machine, stage: int, peers: int, layout: Layout) -> Workload:
    """Return the part of one peer, with steps that the machine has room for where it may choose them."""
    work = of_each(shape.workload(stage, peers, machine.device, machine.narrow, machine.weights), layout)
    least = work if work.is_stage else sized(work, SMALLEST)
    work = replace(work, state_on_disk=shape.placed(least, machine.host_bytes).state_on_disk)
    if work.is_stage:
        return work
    room = machine.device_bytes
    if machine.device == "cpu":
        room = (machine.host_bytes - sum(shape.footprint(work).host.values())) / machine.devices
    return sized(work, step_that_fits(work, room) or SMALLEST)


def _need(shape: RunShape, machine: Machine, work: Workload, stage: int) -> StageNeed:
    sizes = shape.footprint(work)
    return StageNeed(
        stage=stage,
        parameters=work.parameters,
        device=dict(sizes.device),
        host=dict(sizes.host),
        disk=dict(sizes.disk),
        device_bytes=sizes.device_bytes,
        host_bytes=sizes.host_bytes,
        disk_bytes=sizes.disk_bytes,
        fits=_fits(machine, sizes),
        state="disk" if work.state_on_disk else "memory",
    )


def _fits(machine: Machine, sizes: Footprint) -> bool:
    return sizes.host_bytes <= machine.host_bytes and _fits_device(machine, sizes)


def _fits_device(machine: Machine, sizes: Footprint) -> bool:
    if sizes.device_is_host:
        return sizes.host_bytes <= machine.host_bytes
    return sizes.device_bytes <= machine.device_bytes


def _pace(shape: RunShape, machine: Machine, work: Workload) -> Pace:
    """Return the pace if devices wait for each other no time. Ranks on a CPU share its FLOP/s."""
    layout, batch = work.layout, shape.inner.batch_size
    rows = -(-batch // layout.batches)  # of the rank that has most
    of_stage = shape.pipeline.recompute or layout.parts > 1
    recompute = of_stage if work.is_stage else work.recompute == "full"
    flops = rows * shape.data.seq_len * training_work(shape.model, work.blocks, shape.data.seq_len, recompute)
    step_s = flops / layout.tensor / machine.flops * (layout.size if machine.device == "cpu" else 1)
    tokens = batch * shape.data.seq_len
    return Pace(work.exchange, work.parameters, step_s, shape.outer.steps, tokens, machine.link_bits_s)


def _bottleneck(machine: Machine, needs: list[StageNeed], pace: Pace) -> str:
    largest = max(needs, key=lambda need: need.host_bytes)
    if largest.host_bytes > machine.host_bytes:
        return "host memory"
    if not all(need.fits for need in needs):
        return "device memory"
    return "link" if pace.waiting_share > WAITING else "compute"


def _room(shape: RunShape, machine: Machine, needs: list[StageNeed]) -> Iterator[str]:
    """Yield what does not fit, and what would make it fit."""
    largest = max(needs, key=lambda need: need.host_bytes)
    if largest.host_bytes > machine.host_bytes:
        yield (
            f"{_gb(largest.host_bytes)} of memory are needed, with the run's states in files, and"
            f" {_gb(machine.host_bytes)} exist; no setting of this machine changes that"
        )
    device = max(need.device_bytes for need in needs)
    if machine.device != "cpu" and device > machine.device_bytes:
        yield f"{_gb(device)} of device memory are needed and {_gb(machine.device_bytes)} are there" + (
            ", with one sequence at a time and all blocks recomputed" if len(needs) == 1 else ""
        )
    if all(need.fits for need in needs):
        return
    found = [line for line in (_remedy(shape, machine), _more_devices(shape, machine)) if line]
    yield from found or [
        "no optimizer, no number of stages and no layout that this version has makes it fit: choose a smaller model"
    ]


def _remedy(shape: RunShape, machine: Machine) -> str:
    """Return the smallest change that fits: 8-bit moments, split weights, both, then stages."""
    small = replace(shape, pipeline=changed(shape.pipeline, micro_batch=1, recompute=True))
    eight = replace(small, inner=changed(small.inner, optimizer="adamw8bit"))
    has_wide_moments = machine.device == "cuda" and shape.inner.optimizer == "adamw"
    if has_wide_moments and not _all_fit(small, machine) and _all_fit(eight, machine):
        return 'with [inner] optimizer = "adamw8bit" it fits'
    if shape.base is not None:
        nf4 = replace(small, base=changed(shape.base, quantization="nf4"))
        if shape.base.quantization != "nf4" and _all_fit(nf4, machine):
            return 'with [model] quantize = "nf4" it fits'
    elif _fits_split(small, machine):
        return "a peer with --weights split has room for it"
    elif has_wide_moments and _fits_split(eight, machine):
        return 'with [inner] optimizer = "adamw8bit" a peer with --weights split has room for it'
    machine = replace(machine, weights="fp32")
    for stages in range(len(shape.cuts) + 1, _STAGES_TRIED + 1):
        try:
            model = changed(shape.model, tie_embeddings=shape.base is not None and shape.model.tie_embeddings)
            cuts = cut(stages, model, shape.data.seq_len)
        except ConfigError:
            return ""
        staged = replace(small, model=model, cuts=cuts, pipeline=changed(small.pipeline, stages=stages))
        if _all_fit(staged, replace(machine, layout="auto")):  # tp is for whole models
            return (
                f"cut into {stages} stages ([pipeline] stages = {stages}, micro_batch = 1, recompute = true) each part"
                " fits"
            )
    return ""


def _fits_split(shape: RunShape, machine: Machine) -> bool:
    """Whether a GPU has room for the run with split weights, and not without."""
    split = replace(machine, weights="split")
    try:
        check_layout(shape, Layout(replicate=machine.devices), "split")
    except ConfigError:
        return False
    return (
        machine.device == "cuda"
        and machine.weights == "fp32"
        and not _all_fit(shape, machine)
        and _all_fit(shape, split)
    )


def _more_devices(shape: RunShape, machine: Machine) -> str:
    """Return how many of such GPUs in one machine, with a part of each parameter on each, are enough."""
    for count in (count for count in _DEVICES_TRIED if count > machine.devices and machine.device == "cuda"):
        layout = Layout(shard=count)
        try:
            check_layout(shape, layout)
        except ConfigError:
            return ""
        if _all_fit(shape, replace(machine, devices=count, layout="fsdp", weights="fp32")):
            return f"a peer with {count} such cards holds it with --layout fsdp (--cards {count})"
    return ""


def _all_fit(shape: RunShape, machine: Machine) -> bool:
    layout = _layout(shape, machine, USUAL_PEERS)
    works = (_work(shape, machine, stage, USUAL_PEERS, layout) for stage in range(len(shape.cuts)))
    return all(_fits(machine, shape.footprint(work)) for work in works)


def _speed(pace: Pace, compute_s_max: float, stages: int, devices: int) -> Iterator[str]:
    """Yield what keeps the run from its pace."""
    wanted = pace.steps_wanted
    if pace.waiting_share > WAITING:
        yield f"[outer] steps = {wanted} keeps waiting within {WAITING:.0%} of computing; codes of fewer bits need less"
    steps = max(wanted, pace.steps)
    if steps * pace.step_s > compute_s_max:
        yield (
            f"{steps} steps take {steps * pace.step_s:.0f} s and the run ends a round's training after"
            f" {compute_s_max:.0f} s, or {steps_in(compute_s_max, pace.step_s)} steps: raise [run] compute_s_max"
        )
    if stages > 1:
        yield "what stages send each other for every micro-batch is not counted, nor the time that they wait for it"
    if devices > 1:
        yield "what the devices of a peer send each other is not counted"


def _leading(pace: Pace, peers: int, sent: float) -> Iterator[str]:
    """Yield that the link is too slow for what the leader of a full group sends, for which all others wait."""
    seconds = 8 * sent / pace.link_bits_s
    if seconds > WAITING * pace.round_s:
        yield (
            f"the leader of {peers} peers sends {sent / 1e6:.3g} MB a round besides its exchange, which takes"
            f" {seconds:.3g} s on this link, and a round {pace.round_s:.3g} s: lower [run] max_peers or raise [outer]"
            " steps"
        )


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
