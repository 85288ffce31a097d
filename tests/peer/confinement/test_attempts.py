"""Attempts of an attacker inside a worker and inside a rank of a group: with all of Landlock, an older one, and none.
Made without confinement they come through: else these tests would prove nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from peer.confinement.landlock import landlock_abi
from peer.confinement.private_network import MACHINES, PrivateNetwork, open_private_network
from tests.peer.confinement.attempts import BY_LANDLOCK, came_through, open_targets

ROOT = Path(__file__).parents[3]
ABIS = (None, 5, 0)  # the kernel's, one that knows no scopes of signals and sockets, and none
OF_ROOT = {"all files", "packets", "priority of all"}
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="what Linux refuses"),
    pytest.mark.skipif(not landlock_abi(), reason="this kernel has no Landlock"),
]


def tried(
    folder: Path, abi: int | None = None, network: PrivateNetwork = MACHINES, switch: str = "", **grants: bool
) -> dict[str, str]:
    """How the attempts of a process ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BARNRAISE_SANDBOX": switch}
    (folder / "own").mkdir()
    with open_targets(folder) as targets:
        given = msgspec.json.encode((grants, targets, abi, network.fds)).decode()
        command = [sys.executable, "-m", "tests.peer.confinement.attempts", given]
        done = subprocess.run(
            command, env=environment, pass_fds=network.fds, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    ended: dict[str, str] = json.loads(done.stdout)
    return ended


def test_an_unconfined_process_comes_through(tmp_path: Path) -> None:
    ended = tried(tmp_path, switch="off")
    failed = {name: how for name, how in ended.items() if how != "done" and (name not in OF_ROOT or os.getuid() == 0)}
    assert failed == {
        "attributes": "EINVAL",
        "priority of all": "ESRCH",
        "program": "ENOENT",
    }  # the kernel has looked at what they name


@pytest.mark.parametrize("abi", ABIS)
def test_a_worker_does_not(tmp_path: Path, abi: int | None) -> None:
    assert came_through(tried(tmp_path, abi)) == (set() if abi != 0 else BY_LANDLOCK)


@pytest.mark.parametrize("abi", ABIS)
def test_a_rank_of_a_group_does_not(tmp_path: Path, abi: int | None) -> None:
    with closing(open_private_network()) as network:
        if not network.fds:
            pytest.skip(f"this system makes no network: {network.trouble}")
        assert came_through(tried(tmp_path, abi, network, tcp=True)) == (set() if abi != 0 else BY_LANDLOCK)


def test_a_rank_without_a_network_of_its_own_reaches_ports(tmp_path: Path) -> None:
    assert came_through(tried(tmp_path, tcp=True)) == {"port of the machine"}


def test_a_rank_with_a_gpu_uses_unix_sockets(tmp_path: Path) -> None:
    """NCCL hands descriptors from rank to rank by datagrams."""
    came = came_through(tried(tmp_path, tcp=True, accelerators=True))
    assert came == {"port of the machine", "unix socket", "unix datagrams"}
