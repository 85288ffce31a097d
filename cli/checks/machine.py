"""Checks of `peer doctor` that need no network; the others are in `cli.checks.network`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import msgspec

from peer.cgroup import ROOT, cpu_limit, memory_limit
from peer.errors import BarnraiseError, ConfigError, IdentityError, ResourceError
from peer.machine import usable_cores
from peer.native import SWITCH, is_switched_off

State = Literal["ok", "warning", "failure"]
PYTHON_MIN: Final = (3, 10)
LIBP2P: Final = "0.8.1"
DISK_MIN_BYTES: Final = 1 << 30
PROBE_BYTES: Final = 128 << 20  # written to measure a disk
SLOW_S: Final = 60.0  # of writing in a round: longer than many an exchange


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `exit_code` is that of the error that `peer join` would end with."""

    check: str
    state: State
    detail: str
    remedy: str = ""
    exit_code: int = 0


def failure(check: str, error: BarnraiseError) -> Finding:
    """Turn an error, whose sentence is "what: remedy", into a finding."""
    detail, colon, remedy = str(error).rpartition(": ")
    return Finding(check, "failure", detail if colon else str(error), remedy, error.exit_code)


def local_findings(home: Path, devices: Sequence[str], make_key: bool = False) -> Iterator[Finding]:
    """Check versions, device and home; open no socket. With `make_key` make the home's key if it is missing."""
    yield python_finding(sys.version_info[:3])
    yield from _library_findings()
    yield kernels_finding()
    for device in dict.fromkeys(devices):
        yield _device_finding(device)
    yield from container_findings()
    yield home_finding(home)
    yield identity_finding(home, make_key)


def python_finding(running: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, running))
    if running < PYTHON_MIN:
        return Finding("python", "failure", f"Python {text} is too old", "install Python 3.10 or newer", 2)
    return Finding("python", "ok", f"{text} on {platform.system()} {platform.machine()}")


def _existing(home: Path) -> Path:
    """Return the folder under which a home is, or will be made."""
    return next((folder for folder in (home, *home.resolve().parents) if os.path.isdir(folder)), Path("/"))


def disk_finding(home: Path, needs: Sequence[float]) -> Finding:
    """Check the free space of the disk under `home`, which need not exist yet.

    `needs`: bytes for the model, or for each stage. Less than the smallest need is a failure, as a peer takes a stage
    that fits; less than the largest is a warning.
    """
    place = _existing(home)
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return failure("disk", ResourceError(f"{place} cannot be examined ({error.strerror}): choose another --home"))
    there, remedy = f"{free / 1e9:.1f} GB free under {place}", "free some space or choose a --home on another disk"
    if free < min(needs):
        needed = f"{there}, {min(needs) / 1e9:.1f} GB needed"
        return Finding("disk", "failure", needed, remedy, ResourceError.exit_code)
    if free < max(needs):
        return Finding("disk", "warning", f"{there}, {max(needs) / 1e9:.1f} GB needed for the largest stage", remedy)
    return Finding("disk", "ok", there)


def home_finding(home: Path) -> Finding:
    """Check that `home` is writable and not in use by another process. Leaves nothing behind."""
    from swarm.run.home import Home

    existed = os.path.exists(home)  # Path.exists raises for a name that is too long
    try:
        with Home(home).locked():
            pass
    except ResourceError as error:
        return failure("home", error)
    finally:
        if not existed and os.path.isdir(home):
            shutil.rmtree(home)
    return Finding("home", "ok", f"{home} is writable and free")


def identity_finding(home: Path, make_key: bool) -> Finding:
    """Show the peer id of this home, which a coordinator needs to issue a personal invite."""
    from peer.identity import Identity
    from swarm.run.home import Home

    path = Home(home).identity
    if not os.path.exists(path) and not make_key:
        return Finding("identity", "ok", "no key yet; the first `peer join` makes one")
    try:
        return Finding("identity", "ok", Identity.load_or_create(path).peer_id)
    except IdentityError as error:
        return failure("identity", error)


def _library_findings() -> Iterator[Finding]:
    for name in ("torch", "libp2p", "trio", "msgspec", "safetensors", "blake3"):
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, "failure", "not installed", "run `make setup`, or install barnraise again", 2)
            continue
        if name == "libp2p" and found != LIBP2P:
            remedy = f"pip install libp2p=={LIBP2P}"
            yield Finding(name, "failure", f"version {found} is not the one that barnraise has fixes for", remedy, 2)
        else:
            yield Finding(name, "ok", found)


def kernels_finding() -> Finding:
    """Tell whether this installation computes rounds by compiled kernels; without them it gets the same bits later."""
    try:
        from optim.kernels.codec_kernels import KERNELS
    except (ImportError, OSError) as error:  # a broken installation of torch
        return _no_torch("kernels", error)
    if KERNELS:
        return Finding("kernels", "ok", f"compiled for {', '.join(KERNELS)}")
    if is_switched_off():
        return Finding("kernels", "warning", f"off: torch codes and merges, slower ({SWITCH}=0)", f"unset {SWITCH}")
    slower = "not compiled: torch codes and merges, slower"
    return Finding("kernels", "warning", slower, "install a C compiler, then barnraise again")


def _no_torch(check: str, error: Exception) -> Finding:
    return Finding(check, "failure", f"torch cannot be loaded ({error})", "reinstall torch", 2)


def _device_finding(spec: str) -> Finding:
    try:
        from peer.compute.device import resolve_device

        device = resolve_device(spec, compiles=True)
    except ConfigError as error:
        return failure("device", error)
    except (ImportError, OSError) as error:  # a broken installation of torch
        return _no_torch("device", error)
    found = {"bf16": device.bf16, "fp16": device.fp16, "torch.compile": device.compile}
    extras = [word for word, has in found.items() if has]
    with_extras = f" with {' and '.join(extras)}" if extras else ""
    return Finding("device", "ok", f"{device.name} ({device.torch}){with_extras}, {usable_cores()} cores")


def disk_speed_finding(home: Path, round_bytes: float) -> Finding:
    """Measure how many bytes a second the disk under `home` writes, and tell how long `round_bytes` of a round take."""
    place = _existing(home)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(PROBE_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return failure(
            "disk speed", ResourceError(f"{place} cannot be written ({error.strerror}): choose another --home")
        )
    rate = PROBE_BYTES / max(1e-6, time.perf_counter() - began)
    detail = f"{rate / 1e6:.0f} MB/s; a round writes {round_bytes / 1e9:.2g} GB in {round_bytes / rate:.2g} s"
    if round_bytes > SLOW_S * rate:
        remedy = "choose a --home on a faster disk; each round waits for it"
        return Finding("disk speed", "warning", detail, remedy)
    return Finding("disk speed", "ok", detail)


def container_findings(root: Path = ROOT) -> Iterator[Finding]:
    """Name what the control groups of this process allow, if they limit it. `root` stands for `/`."""
    memory, cpu = memory_limit(root), cpu_limit(root)
    limits = []
    if memory is not None:
        free = f"{memory.free_bytes / 1e9:.1f} GB of it free"
        limits.append(f"{memory.limit_bytes / 1e9:.1f} GB of memory, {free} ({memory.path})")
    if cpu is not None:
        limits.append(f"{cpu.cores:.3g} cores ({cpu.path})")
    if limits:
        yield Finding("container", "ok", f"this process may use {' and '.join(limits)}")


def memory_finding(free_bytes: float, needs: Sequence[float], in_files: bool = False) -> Finding:
    """Check the free memory. `needs`: bytes for the model, or for each stage; `in_files`: whether `peer join` puts the
    states of one into files, as memory is short.

    `peer join` takes no stage, and no whole model, that does not fit.
    """
    least, most = min(needs), max(needs)
    free = f"{free_bytes / 1e9:.1f} GB free" + in_files * ", so the run's state lies in files of --home (--state disk)"
    if len(needs) == 1:
        detail = f"{free}, about {least / 1e9:.1f} GB needed for this model"
        if free_bytes < least:
            remedy = "free some, or say with --memory-limit of `peer join` how much it may use"
            return Finding("memory", "failure", detail, remedy, ResourceError.exit_code)
        return Finding("memory", "ok", detail)
    detail = f"{free}, about {least / 1e9:.1f} GB needed for the smallest stage and {most / 1e9:.1f} GB for the largest"
    if free_bytes < least:
        return Finding("memory", "failure", detail, "free some, or join with --role feeder", ConfigError.exit_code)
    if free_bytes < most:
        return Finding("memory", "warning", detail, "free some, or this machine takes only a stage that fits")
    return Finding("memory", "ok", detail)
