"""What control groups allow, read from made-up trees: both versions, nested, in a container and outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.checks.machine import container_findings
from peer.cgroup import CpuLimit, MemoryLimit, cpu_limit, memory_limit
from peer.machine import free_memory_bytes, memory_bytes, usable_cores

MB = 1_000_000
UNLIMITED_V1 = str(0x7FFFFFFFFFFFF000)
V1_MOUNTS = (
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "36 31 0:33 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
)
V2_MOUNT = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def a_tree(root: Path, files: dict[str, str]) -> Path:
    """Write files of a made-up machine, whose memory has 23 GB available."""
    for name, text in {"proc/meminfo": "MemTotal: 32000000 kB\nMemAvailable: 23000000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    root = a_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice\n",
            "proc/self/mountinfo": V2_MOUNT.format(top="/"),
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{MB}\n",
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        },
    )
    assert memory_limit(root) is None and cpu_limit(root) is None
    assert free_memory_bytes(root) == 23_000_000 * 1024
    assert list(container_findings(root)) == []


@pytest.mark.parametrize("mounts", [V2_MOUNT.format(top="/"), ""])
def test_version_2_in_a_container(tmp_path: Path, mounts: str) -> None:
    root = a_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": mounts,
            "sys/fs/cgroup/memory.max": f"{800 * MB}\n",
            "sys/fs/cgroup/memory.current": f"{300 * MB}\n",
            "sys/fs/cgroup/memory.stat": f"anon {100 * MB}\nfile {200 * MB}\ninactive_file {150 * MB}\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(800 * MB, 650 * MB, "/sys/fs/cgroup/memory.max")
    assert free_memory_bytes(root) == 650 * MB
    assert cpu_limit(root) == CpuLimit(1.5, "/sys/fs/cgroup/cpu.max")
    (finding,) = container_findings(root)
    assert finding.detail == (
        "this process may use 0.8 GB of memory, 0.7 GB of it free (/sys/fs/cgroup/memory.max)"
        " and 1.5 cores (/sys/fs/cgroup/cpu.max)"
    )


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    inner, outer = "sys/fs/cgroup/machine.slice/a", "sys/fs/cgroup/machine.slice"
    root = a_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/machine.slice/a/b\n",
            "proc/self/mountinfo": V2_MOUNT.format(top="/"),
            f"{inner}/b/memory.max": "max\n",
            f"{inner}/memory.max": f"{900 * MB}\n",
            f"{inner}/memory.current": f"{100 * MB}\n",
            f"{inner}/memory.high": f"{850 * MB}\n",
            f"{outer}/memory.max": f"{1000 * MB}\n",  # more, but its other groups take nearly all
            f"{outer}/memory.current": f"{990 * MB}\n",
            f"{inner}/b/cpu.max": "400000 100000\n",
            f"{outer}/cpu.max": "200000 100000\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(1000 * MB, 10 * MB, f"/{outer}/memory.max")
    assert memory_bytes(root) == 850 * MB, "a limit of which much is left may be the smaller one"
    assert cpu_limit(root) == CpuLimit(2.0, f"/{outer}/cpu.max")
    (root / f"{outer}/memory.current").write_text(f"{100 * MB}\n")
    assert memory_limit(root) == MemoryLimit(850 * MB, 750 * MB, f"/{inner}/memory.high")


def version_1(group: str) -> dict[str, str]:
    return {
        "proc/self/cgroup": f"9:name=systemd:/\n4:memory:{group}\n3:cpu,cpuacct:{group}\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5000 * MB}\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }


@pytest.mark.parametrize("mounts", [V1_MOUNTS.format(top="/"), ""])
def test_version_1(tmp_path: Path, mounts: str) -> None:
    folder = "sys/fs/cgroup/{}/docker/x"
    root = a_tree(
        tmp_path,
        {
            **version_1("/docker/x/y"),
            "proc/self/mountinfo": mounts,
            f"{folder.format('memory')}/memory.limit_in_bytes": f"{800 * MB}\n",
            f"{folder.format('memory')}/memory.usage_in_bytes": f"{200 * MB}\n",
            f"{folder.format('memory')}/memory.stat": f"cache 5\ntotal_inactive_file {50 * MB}\n",
            f"{folder.format('memory')}/y/memory.limit_in_bytes": UNLIMITED_V1,
            f"{folder.format('cpu,cpuacct')}/cpu.cfs_quota_us": "50000\n",
            f"{folder.format('cpu,cpuacct')}/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(root) == MemoryLimit(800 * MB, 650 * MB, f"/{folder.format('memory')}/memory.limit_in_bytes")
    assert cpu_limit(root) == CpuLimit(0.5, f"/{folder.format('cpu,cpuacct')}/cpu.cfs_quota_us")
    assert usable_cores(root) == 1


def test_version_1_in_a_container_that_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    files = {**version_1("/docker/x"), "proc/self/mountinfo": V1_MOUNTS.format(top="/docker/x")}
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = f"{800 * MB}\n"
    files["sys/fs/cgroup/memory/memory.usage_in_bytes"] = f"{900 * MB}\n"
    assert memory_limit(a_tree(tmp_path, files)) == MemoryLimit(
        800 * MB, 0, "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )


@pytest.mark.parametrize(
    "text", ["", "garbage", "::", "0::", "0::/../../..", "4:memory", "0::/a\x00b", "0::/b\n" + "9" * 5000, "9" * 5000]
)
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, text: str) -> None:
    values = {"sys/fs/cgroup/memory.max": text, "sys/fs/cgroup/cpu.max": text, "sys/fs/cgroup/memory.current": text}
    root = a_tree(tmp_path, {"proc/self/cgroup": text, "proc/self/mountinfo": text, **values})
    assert memory_limit(root) is None and cpu_limit(root) is None
    assert free_memory_bytes(root) == 23_000_000 * 1024


def test_a_quota_counts_in_whole_cores_and_never_beyond_the_machine(tmp_path: Path) -> None:
    machine = len(os.sched_getaffinity(0))
    for quota, cores in (("1000 100000", 1), ("100000 100000", 1), ("99900000 100000", machine), ("0 0", machine)):
        root = a_tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"})
        assert usable_cores(root) == cores, quota
