"""Grants to a confined worker: the paths of Python, of its libraries and of the devices, and its own."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.confinement.landlock import READ, RUN, USE_DEVICE, WRITE, WRITE_FILES

_HOUSE: Final = Path(__file__).resolve().parents[2]
_LIBRARIES: Final = ("/usr", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store", "/run/opengl-driver")
_SETTINGS: Final = (
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/nvidia",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/driver",
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/stat",
    "/proc/sys",
    "/proc/version",
    "/sys/bus",
    "/sys/class",
    "/sys/devices",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/sys/module",
)
_DEVICES: Final = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/kfd",
    "/dev/dri",
    "/dev/dxg",
)
_NVIDIA: Final = "/dev/nvidia*"
_OWN_THREADS: Final = "/proc/self/task"  # the driver of CUDA names its threads, and fails where it cannot
_SHARED_MEMORY: Final = "/dev/shm"
_COMPILER: Final = ("/bin", "/etc/alternatives", "/etc/passwd", "/etc/nsswitch.conf")
_MODPROBE_S: Final = 10.0


@dataclass(frozen=True)
class Grants:
    """Grants to a worker beside Python, its libraries and the devices."""

    private: str
    """The one folder that it may write."""
    readable: tuple[str, ...] = ()
    """Files and folders that it may read."""
    compiles: bool = False
    """It may start programs: torch.compile runs a compiler."""
    accelerators: bool = False
    """It may compute beside the CPU: the driver's modules must be loaded before it is confined."""
    tcp: bool = False
    """It may use sockets and shared memory with names, as the ranks of a group do among themselves."""

    def rules(self) -> Iterator[tuple[str, int]]:
        """Yield paths, and the rights beneath them."""
        code = RUN if self.compiles else READ
        for path in (*_LIBRARIES, *_python()):
            yield path, code
        for path in (*_SETTINGS, *(one for name in self.readable for one in (name, *_linked(name)))):
            yield path, READ
        for path in (*_DEVICES, *glob.glob(_NVIDIA)):
            yield path, USE_DEVICE
        yield self.private, WRITE
        if self.accelerators:
            yield _OWN_THREADS, WRITE_FILES
        if self.compiles:
            for path in _COMPILER:
                yield path, code
        if self.compiles or self.tcp:
            yield _SHARED_MEMORY, WRITE


def load_nvidia_modules() -> None:
    """Load the modules of NVIDIA's driver, if that has not happened since the machine was started. The driver itself
    would start a program with more privileges for it, which a confined process cannot."""
    program = shutil.which("nvidia-modprobe")
    if program is not None and not os.path.exists("/dev/nvidia-uvm"):
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([program, "-c=0", "-u"], timeout=_MODPROBE_S, check=False, capture_output=True)


def _python() -> Iterator[str]:
    """Yield where Python, its packages and our own code lie. Our folder may be a checkout, with more in it."""
    yield from (sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"], str(_HOUSE / "peer"))
    yield from (place for place in sys.path if place and Path(place).resolve() != _HOUSE)
    if _HOUSE.name in ("site-packages", "dist-packages"):
        yield str(_HOUSE)
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))


def _linked(folder: str) -> Iterator[str]:
    """Yield the files outside that links in the folder lead to, as in a cache of Hugging Face."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if os.path.islink(path):
                yield os.path.realpath(path)
