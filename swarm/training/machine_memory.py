"""This machine's memory for a peer: its user's limit, else the free memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch

from peer.compute.device import narrow_type, resolve_device
from peer.config import InnerConfig, MasterType
from peer.files import can_reserve
from peer.footprint.layout import Layout, check_split
from peer.footprint.step_size import SMALLEST, StepSize, sized, step_that_fits
from peer.footprint.workload import DeviceKind, Footprint, Workload
from peer.machine import free_memory_bytes
from swarm.placement.costs import USUAL_PEERS, RunShape, of_each
from swarm.run.manifest import Manifest
from swarm.run.peer_context import JoinConfig


@dataclass(frozen=True)
class Accelerator:
    """The computing device: its kind, whether its products are in 16 bits, a GPU's memory, and how it holds weights."""

    kind: DeviceKind
    narrow: bool
    memory_bytes: float = math.inf
    weights: MasterType = "fp32"

    @classmethod
    def of(cls, device: str, inner: InnerConfig, weights: MasterType = "fp32") -> Accelerator:
        """Look at the device that `peer join --device` names. Raises ConfigError."""
        found = resolve_device(device)
        kind = cast("DeviceKind", found.torch.type)
        return cls(kind, narrow_type(found, inner) is not None, found.memory_bytes or math.inf, weights)


def accelerator_of(config: JoinConfig, manifest: Manifest) -> Accelerator:
    """Return what a peer of these settings computes on. Raises ConfigError."""
    compute = config.compute
    return Accelerator.of(compute.device, compute.applied_to(manifest.inner), compute.weights)


def host_limit(config: JoinConfig, kind: DeviceKind) -> float | None:
    """Return what the user lets training take of the machine's memory; None for what is free."""
    return config.compute.memory_bytes if kind == "cpu" else config.compute.host_memory_bytes


def layout_of(config: JoinConfig, manifest: Manifest) -> Layout:
    """Return how this peer's devices share the whole model, or its stage. "auto" looks at the stage that the user has
    named, else at all that the peer may take. Raises ConfigError for devices that are not there, and for a layout that
    does not suit them or the model."""
    _check_weights(config, manifest)
    if len(config.compute.devices) < 2:
        return Layout()
    found = [Accelerator.of(device, config.compute.applied_to(manifest.inner)) for device in config.compute.devices]
    shape = RunShape.of(manifest)
    stages = range(manifest.stages) if config.stage is None else (config.stage,)
    works = [shape.workload(stage, USUAL_PEERS, found[0].kind, found[0].narrow) for stage in stages]
    least = min(one.memory_bytes for one in found)

    def fits(layout: Layout) -> bool:
        all_sizes = [shape.footprint(least_work(work, layout)) for work in works]
        return all(sizes.device_bytes <= _room(config, found[0].kind, least, sizes) for sizes in all_sizes)

    layout = Layout.parse(config.compute.layout, len(config.compute.devices), fits)
    if manifest.stages > 1:
        layout.check_stage(manifest.model.adapter is not None)
    layout.check(manifest.model, manifest.inner.optimizer, manifest.data.seq_len, shape.base)
    return layout


def _check_weights(config: JoinConfig, manifest: Manifest) -> None:
    """Raise ConfigError where this peer cannot hold the weights as its user has said."""
    compute = config.compute
    if compute.weights == "split":
        layout = Layout(replicate=max(1, len(compute.devices)))
        is_fp16 = narrow_type(resolve_device(compute.device), compute.applied_to(manifest.inner)) is torch.float16
        check_split(layout, manifest.model, manifest.inner.optimizer, is_fp16, manifest.stages > 1)


def may_lie_on_disk(config: JoinConfig, manifest: Manifest) -> bool:
    """Return whether this peer's states may lie in files."""
    return config.state != "memory" and can_reserve() and manifest.outer.has_common_state


def state_lies_on_disk(config: JoinConfig, manifest: Manifest, stage: int) -> bool:
    """Return whether this peer's states of that stage lie in files: as the user has said, else where its memory has too
    little room for them. Raises ConfigError for the devices."""
    if config.state != "auto" or not may_lie_on_disk(config, manifest):
        return config.state == "disk"
    found, shape = accelerator_of(config, manifest), RunShape.of(manifest)
    work = shape.workload(stage, USUAL_PEERS, found.kind, found.narrow, found.weights)
    limit = host_limit(config, found.kind)
    memory = free_memory_bytes() if limit is None else limit
    return shape.placed(least_work(work, layout_of(config, manifest)), memory).state_on_disk


def least_work(work: Workload, layout: Layout) -> Workload:
    """Return what each device of a layout does at least: of a whole model the smallest step. The micro-batches of a
    stage are as large as the run says."""
    return of_each(work if work.is_stage else sized(work, SMALLEST), layout)


def step_size(config: JoinConfig, manifest: Manifest) -> StepSize:
    """Return how much of a step of a whole model is on a device at a time, by arithmetic. For one GPU the whole batch,
    since the worker sees its device and this process does not. Raises ConfigError for the devices."""
    found, shape = accelerator_of(config, manifest), RunShape.of(manifest)
    layout, whole = layout_of(config, manifest), StepSize(manifest.inner.batch_size)
    if found.kind != "cpu" and layout.size == 1:
        return whole
    work = shape.workload(0, USUAL_PEERS, found.kind, found.narrow, found.weights)
    work = replace(work, layout=layout, state_on_disk=state_lies_on_disk(config, manifest, 0))
    room = _room(config, found.kind, found.memory_bytes, shape.footprint(sized(work, whole)))
    return step_that_fits(work, room) or SMALLEST


def _room(config: JoinConfig, kind: DeviceKind, device_bytes: float, sizes: Footprint) -> float:
    """Return the bytes that each device has for training: of a GPU what the user allows, of the machine's memory its
    share of what the rest leaves."""
    if kind != "cpu":
        return min(device_bytes, config.compute.memory_bytes or math.inf)
    limit = host_limit(config, kind)
    memory = free_memory_bytes() if limit is None else limit
    return (memory - sum(sizes.host.values())) / sizes.devices
