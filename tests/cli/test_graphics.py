"""A GPU that is on the bus while torch has none: what is said, and the command that mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.checks.graphics import unused_gpus

Build = tuple[str | None, str | None, bool]
CPU_ONLY: Build = (None, None, False)
CUDA: Build = ("13.0", None, False)


def machine(root: Path, vendor: str, kind: str = "0x030200", driver: str = "") -> Path:
    """Lay out what Linux shows of a PCI device and its driver below `root`."""
    device = root / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "class").write_text(f"{kind}\n")
    (device / "vendor").write_text(f"{vendor}\n")
    if driver:
        (root / driver).parent.mkdir(parents=True)
        (root / driver).touch()
    return root


@pytest.mark.parametrize(
    ("vendor", "driver", "build", "detail", "remedy"),
    [
        ("0x10de", "dev/nvidiactl", CPU_ONLY, "built without it", "make setup PIP_EXTRA_INDEX_URL="),
        ("0x10de", "", CUDA, "driver does not answer", "install NVIDIA's driver"),
        ("0x10de", "dev/nvidiactl", CUDA, "built for 13.0, does not start", "update NVIDIA's driver"),
        ("0x1002", "dev/kfd", CUDA, "built without it", "ROCm"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_told(
    tmp_path: Path, vendor: str, driver: str, build: Build, detail: str, remedy: str
) -> None:
    (found,) = unused_gpus(machine(tmp_path, vendor, driver=driver), *build)
    assert found.state == "warning" and detail in found.detail and remedy in found.remedy


@pytest.mark.parametrize(
    ("vendor", "kind", "build"),
    [
        ("0x10de", "0x030000", ("13.0", None, True)),
        ("0x10de", "0x040300", CPU_ONLY),  # the sound device of a card
        ("0x8086", "0x030000", CPU_ONLY),  # a processor's own
    ],
)
def test_all_else_is_no_matter(tmp_path: Path, vendor: str, kind: str, build: Build) -> None:
    assert not list(unused_gpus(machine(tmp_path, vendor, kind), *build))


def test_a_machine_without_a_bus_is_no_matter(tmp_path: Path) -> None:
    assert not list(unused_gpus(tmp_path, *CPU_ONLY))
