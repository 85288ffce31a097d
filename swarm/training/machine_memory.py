"""What this machine's memory allows a peer: what its user has said, else what is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from peer.compute.device import resolve_device, uses_bf16
from peer.config import InnerConfig
from peer.footprint.step_size import SMALLEST, StepSize, sized, step_that_fits
from peer.footprint.workload import DeviceKind
from peer.free_memory import free_memory_bytes
from swarm.placement.costs import USUAL_PEERS, RunShape
from swarm.run.manifest import Manifest
from swarm.run.peer_context import JoinConfig


@dataclass(frozen=True)
class Accelerator:
    """What computes: the kind of device, and whether its products are in bf16."""

    kind: DeviceKind
    bf16: bool

    @classmethod
    def of(cls, device: str, inner: InnerConfig) -> Accelerator:
        """Look at the device that `peer join --device` names. Raises ConfigError."""
        found = resolve_device(device)
        return cls(cast("DeviceKind", found.torch.type), uses_bf16(found, inner))


def host_limit(config: JoinConfig, kind: DeviceKind) -> float | None:
    """Return what the user lets training take of the machine's memory; None for what is free."""
    return config.memory_bytes if kind == "cpu" else config.host_memory_bytes


def step_size(config: JoinConfig, manifest: Manifest) -> StepSize:
    """Return how much of a step of a whole model is on the device at a time. By arithmetic on a CPU; elsewhere the
    whole batch, since the worker sees its device and this process does not. Raises ConfigError for the device."""
    found, shape = Accelerator.of(config.device, manifest.inner), RunShape.of(manifest)
    whole = StepSize(manifest.inner.batch_size)
    if found.kind != "cpu":
        return whole
    work = shape.workload(0, USUAL_PEERS, found.kind, found.bf16)
    sizes = shape.footprint(sized(work, whole))
    limit = host_limit(config, found.kind)
    memory = free_memory_bytes() if limit is None else limit
    return step_that_fits(work, memory - sum(sizes.host.values())) or SMALLEST
