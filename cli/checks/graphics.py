"""The GPUs of this machine that are not used, and what mends it where torch cannot use them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cli.checks.machine import Finding

_DISPLAY: Final = "0x03"  # the PCI class of GPUs, with and without a screen
_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DRIVERS: Final = {"NVIDIA": "dev/nvidiactl", "AMD": "dev/kfd"}
_INDEX: Final = "make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl"
_BUILDS: Final = {
    "NVIDIA": f"install one with CUDA, such as `{_INDEX}/cu130`",
    "AMD": f"install one with ROCm, by `{_INDEX}/ROCM_VERSION` (barnraise has not been tried with it)",
}


def gpu_findings(devices: Sequence[str]) -> Iterator[Finding]:
    """Name the GPUs of this machine where it has more of them than `devices` names, and those that torch does not use.
    Where `devices` is the CPU, name none."""
    if set(devices) == {"cpu"}:
        return
    with suppress(ImportError, OSError):  # another check says that torch cannot be loaded
        import torch

        has_gpu = torch.cuda.is_available()
        yield from unused_gpus(Path("/"), torch.version.cuda, torch.version.hip, has_gpu)
        count = torch.cuda.device_count() if has_gpu else 0
        if count > len(devices):
            cards = [torch.cuda.get_device_properties(number) for number in range(count)]
            named = ", ".join(
                f"{number}: {card.name}, {card.total_memory / 1e9:.0f} GB" for number, card in enumerate(cards)
            )
            every = ",".join(map(str, range(count)))
            yield Finding("devices", "ok", f"{named}; `peer join --devices {every}` uses them together")


def unused_gpus(root: Path, cuda: str | None, rocm: str | None, has_gpu: bool) -> Iterator[Finding]:
    """Yield a warning for each kind of GPU that is on the bus while torch, built for this CUDA and ROCm, has none.
    `root` stands for `/`."""
    if has_gpu:
        return
    for vendor in sorted(_gpu_vendors(root)):
        built = cuda if vendor == "NVIDIA" else rocm
        if built is None:
            what, remedy = "this torch is built without it", _BUILDS[vendor]
        elif not os.path.exists(root / _DRIVERS[vendor]):
            what = "its driver does not answer"
            remedy = f"install {vendor}'s driver, and start a container with its GPUs (`docker run --gpus all`)"
        else:
            what = f"this torch, which is built for {built}, does not start with its driver"
            remedy = f"update {vendor}'s driver, or install a torch for an older one"
        yield Finding("gpu", "warning", f"an {vendor} GPU is in this machine and is not used: {what}", remedy)


def _gpu_vendors(root: Path) -> set[str]:
    found = set()
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            if (device / "class").read_text().startswith(_DISPLAY):
                found.add(_VENDORS.get((device / "vendor").read_text().strip(), ""))
    return found - {""}
