"""Checks before a peer takes part: the run has a place for it, and this machine has room for the run.

A stranger wrote the run's rules. So their need is compared with this machine before any of it is allocated, and the
text to train on is what this machine's user has named.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from peer.data.text_corpus import check_source, token_cache_bytes
from peer.errors import ConfigError, ResourceError
from peer.footprint.host import written_in_a_day
from peer.footprint.layout import ONE_DEVICE, Layout
from peer.footprint.workload import Footprint
from peer.machine import free_memory_bytes
from swarm.pages.sizes import CACHE_BYTES_MIN
from swarm.placement.costs import USUAL_PEERS, RunShape
from swarm.run.manifest import Manifest
from swarm.run.peer_context import JoinConfig
from swarm.run.sections import BYTES_TOKENIZER
from swarm.training.machine_memory import (
    Accelerator,
    accelerator_of,
    host_limit,
    layout_of,
    least_work,
    may_lie_on_disk,
    state_lies_on_disk,
)


def check_join(config: JoinConfig, manifest: Manifest) -> None:
    """Raise ConfigError or ResourceError unless a peer with this `config` can take part. Nothing is allocated."""
    check_role(config, manifest)
    check_text(config, manifest)
    if config.role != "feeder":
        check_memory(config, manifest)
    check_disk(config, manifest)


def check_role(config: JoinConfig, manifest: Manifest) -> None:
    """Raise ConfigError unless the run has a place for the role and stage of `config`, and a state where it wants one
    in files."""
    if config.state == "disk" and not manifest.outer.has_common_state:
        raise ConfigError("this run's peers change their weights in place, in memory: leave out --state disk")
    if manifest.stages == 1:
        if config.role not in ("auto", "full") or config.stage not in (None, 0):
            raise ConfigError("in this run every peer holds the whole model: leave out --role and --stage")
    elif config.role == "full":
        raise ConfigError(f"--role full, but the model is cut into {manifest.stages} stages: choose --role stage")
    elif config.role == "feeder" and config.stage is not None:
        raise ConfigError("a feeder has no stage: leave out either --role feeder or --stage")
    elif config.stage is not None and not 0 <= config.stage < manifest.stages:
        raise ConfigError(f"there is no stage {config.stage}: choose 0 to {manifest.stages - 1}, or leave --stage out")


def check_text(config: JoinConfig, manifest: Manifest) -> None:
    """Raise ConfigError if this peer is to read text that its user has not named."""
    if manifest.stages == 1 or config.role == "feeder" or config.stage == 0:
        check_source(manifest.data, config.text.folder)


def check_memory(config: JoinConfig, manifest: Manifest) -> None:
    """Raise an error if this peer's stage, or every stage, needs more memory than the machine has: ConfigError for the
    user's limit, which counts where it is given, ResourceError for what is free. The worker finds out what fits on a
    GPU."""
    found = accelerator_of(config, manifest)
    needs = memory_needs(manifest, found, layout_of(config, manifest), may_lie_on_disk(config, manifest))
    limit = host_limit(config, found.kind)
    name = "--memory-limit" if found.kind == "cpu" else "--host-memory-limit"
    needed, what, remedy = min(needs), "the smallest stage", "or join with --role feeder"
    if manifest.stages == 1:
        what, remedy = "the model", "or join a run of a smaller model"
    elif config.stage is not None:
        needed, what = needs[config.stage], f"stage {config.stage}"
    there = f"and {what} needs {needed / 1e9:.3g} GB"
    if limit is not None:
        if needed > limit:
            if manifest.stages > 1 and min(needs) <= limit:
                remedy = "or leave --stage out"
            raise ConfigError(f"{name} is {limit / 1e9:.3g} GB {there}: raise it, {remedy}")
    elif needed > (free := free_memory_bytes()):
        raise ResourceError(
            f"{free / 1e9:.3g} GB of memory are free {there}: free some, say with {name} how much this peer may use,"
            f" {remedy}"
        )


def check_disk(config: JoinConfig, manifest: Manifest) -> None:
    """Raise ResourceError if the home's disk has too little room for all that this peer writes, in its stage or in the
    smallest one. The home's present files count as room."""
    needs = disk_needs(manifest, config.text.folder, stages_in_files(config, manifest))
    needed = min(needs) if config.stage is None else needs[config.stage]
    if config.role == "feeder":
        needed = _cached_bytes(manifest, config.text.folder)
    free = shutil.disk_usage(config.home).free
    if needed > free and needed > free + _held_bytes(config.home):
        raise ResourceError(
            f"{free / 1e9:.3g} GB are free on the disk of {config.home} and this run's checkpoints, results and tokens"
            f" need {needed / 1e9:.3g} GB: free some space, or choose a --home on another disk"
        )


def disk_needs(manifest: Manifest, data_folder: str, in_files: Collection[int] = ()) -> list[float]:
    """Return the bytes on disk that each stage needs. `data_folder`: this machine's text, "" for none; `in_files`: the
    stages whose states lie there."""
    cpu = Accelerator("cpu", narrow=False)
    found = zip(*(footprints(manifest, cpu, data_folder, on_disk=on_disk) for on_disk in (False, True)), strict=True)
    return [sizes[stage in in_files].disk_bytes for stage, sizes in enumerate(found)]


def _cached_bytes(manifest: Manifest, data_folder: str) -> int:
    if manifest.data.pages is not None:
        return 0 if data_folder else CACHE_BYTES_MIN
    return 0 if manifest.tokenizer == BYTES_TOKENIZER else token_cache_bytes(manifest.data, data_folder)


def memory_needs(
    manifest: Manifest, device: Accelerator, layout: Layout = ONE_DEVICE, on_disk: bool = False
) -> list[float]:
    """Return the bytes of this machine's memory that each stage needs at least, on a CPU with what a step takes."""
    return [sizes.host_bytes for sizes in footprints(manifest, device, layout=layout, on_disk=on_disk)]


def own_needs(config: JoinConfig, manifest: Manifest, device: Accelerator, layout: Layout) -> list[float]:
    """Return the bytes of this machine's memory that each stage needs, with its states where this peer puts them."""
    in_memory, in_files = (memory_needs(manifest, device, layout, on_disk) for on_disk in (False, True))
    found = enumerate(zip(in_memory, in_files, strict=True))
    return [needs[state_lies_on_disk(config, manifest, stage)] for stage, needs in found]


def stages_in_files(config: JoinConfig, manifest: Manifest) -> list[int]:
    """Return the stages whose states this peer puts into files."""
    return [stage for stage in range(manifest.stages) if state_lies_on_disk(config, manifest, stage)]


def written_a_round(config: JoinConfig, manifest: Manifest, stage: int) -> float:
    """Return about how many bytes a peer whose states of that stage lie in files writes in a round."""
    found, shape = accelerator_of(config, manifest), RunShape.of(manifest)
    work = shape.workload(stage, USUAL_PEERS, found.kind, found.narrow, found.weights)
    return written_in_a_day(replace(work, state_on_disk=True), rounds=1.0)


def footprints(
    manifest: Manifest,
    device: Accelerator,
    data_folder: str = "",
    layout: Layout = ONE_DEVICE,
    on_disk: bool = False,
) -> list[Footprint]:
    """Return the bytes that each stage takes at least. `data_folder`: this machine's text, "" for none; `on_disk`:
    whether its states lie in files."""
    shape, cached = RunShape.of(manifest), _cached_bytes(manifest, data_folder)
    of = (USUAL_PEERS, device.kind, device.narrow, device.weights)
    works = [shape.workload(stage, *of) for stage in range(manifest.stages)]
    return [shape.footprint(replace(least_work(work, layout), state_on_disk=on_disk), cached) for work in works]


def room_for_stages(config: JoinConfig, manifest: Manifest) -> float:
    """Return the bytes of this machine's memory that a stage may take, as all peers count them: on one device, with
    states in files. The further memory of several devices, or of states in memory, is not available to a stage."""
    found = accelerator_of(config, manifest)
    counted = memory_needs(manifest, found, on_disk=manifest.outer.has_common_state)
    taken = memory_needs(manifest, found, layout_of(config, manifest), may_lie_on_disk(config, manifest))
    beyond = max(own - usual for usual, own in zip(counted, taken, strict=True))
    return max(0.0, (host_limit(config, found.kind) or free_memory_bytes()) - beyond)


def _held_bytes(home: Path) -> int:
    """Return what the files in a peer's home take on its disk."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(home) for name in names)
    return sum(512 * os.lstat(path).st_blocks for path in paths)
