"""A real worker in its confinement, and commands that go beyond its slots and vectors."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peer.confinement.landlock import landlock_abi
from peer.errors import ResourceError, StageRefused
from peer.footprint.layout import Layout
from peer.ipc.inner_options import InnerRunOptions
from peer.ipc.shared_memory import SharedBuffer
from peer.ipc.stage_slots import MicroBatchSlot
from peer.worker.stage_client import MicroBatch
from tests.peer.confinement.attempts import came_through, open_targets
from tests.peer.support.echo_worker import EchoGroup
from tests.peer.support.stage_harness import MODEL
from tests.peer.support.stage_worker_harness import open_worker
from tests.peer.support.worker_harness import HOUR_S, Log, open_test_worker_group, worker_config
from tests.support.forking.forked import forked_workers

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="a process is examined through Linux's /proc"),
]
needs_landlock = pytest.mark.skipif(not landlock_abi(), reason="this kernel has no Landlock")
Outcomes = dict[str, str]


@needs_landlock
async def test_it_trains_in_full_confinement(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/canary")
    said: dict[str, object] = {}
    log = Log()
    with log.subscribed(lambda event: said.update(event.fields) if event.name == "worker_confined" else None):
        async with open_test_worker_group(tmp_path, text, events=log) as (worker_group, _):
            assert (await worker_group.inner_steps([(0, 40)], 0, HOUR_S)).steps == 10
            assert math.isfinite(await worker_group.evaluate(1))
            process = Path(f"/proc/{worker_group.worker_pid}")
            names = {line.partition(b"=")[0] for line in (process / "environ").read_bytes().split(b"\0")}
            status = dict(line.split(":\t") for line in (process / "status").read_text().splitlines() if ":\t" in line)
            limits = (process / "limits").read_text()
    assert b"PATH" in names and not names & {b"OPENAI_API_KEY", b"SSH_AUTH_SOCK"}
    assert b"canary" not in b"".join(names)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert next(line for line in limits.splitlines() if "core" in line).split()[4:6] == ["0", "0"]
    assert said.pop("pid") == int(process.name)
    assert said == {
        "core_dumps": "forbidden",
        "privileges": "no new ones",
        "landlock": f"ABI {landlock_abi()}",
        "seccomp": "in force",
    }


@needs_landlock
async def test_it_reaches_nothing_of_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.worker.process._MODULE", "tests.peer.support.echo_worker")
    (data := tmp_path / "data").mkdir()
    with open_targets(data) as targets:
        with forked_workers():  # that it starts as a program is seen above
            async with EchoGroup.open(worker_config(tmp_path, data)) as group:
                alone = await group.ask(group.reach(targets), Outcomes)
        async with EchoGroup.open(worker_config(tmp_path, data, ranks=Layout(replicate=2))) as group:
            ranks = await group.ask_each(group.reach(targets), Outcomes)
    given = {"read", "list"}  # the folder is that of its data
    assert [came_through(ended) for ended in (alone, *ranks)] == 3 * [given]


@pytest.mark.usefixtures("forked")
async def test_a_micro_batch_beyond_its_slot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.worker.stage_client.check_size", lambda *_: None)  # the parent's own check
    most = 64  # tokens in a slot
    sizes = [
        (1, most + 1),
        (most + 1, 1),
        (5, 16),
        (-1, 16),
        (1, 0),
        (-2, -8),
        (1, MODEL.max_seq_len + 1),
        (1 << 40, 1),
    ]
    async with open_worker(tmp_path, 1, slots=3) as (worker_group, _):
        pid = worker_group.worker_pid
        async with worker_group.slot() as slot, worker_group.slot() as after:
            assert after.number == slot.number + 1
            after.hidden(4, 16).fill_(7.0)
            for batch, length in sizes:
                for call in (worker_group.forward, worker_group.backward):
                    with pytest.raises(StageRefused, match="tokens") as caught:
                        await call(MicroBatch("a", 1, 0), slot, batch, length)
                    assert caught.value.reason == "shape"
            for number in (-1, 3, 1 << 40):
                beyond = MicroBatchSlot(slot._area, number, lambda _: None)
                for call in (worker_group.forward, worker_group.backward):
                    with pytest.raises(StageRefused, match=f"no slot {number}"):
                        await call(MicroBatch("a", 1, 0), beyond, 2, 8)
            assert bool((after.hidden(4, 16) == 7.0).all())
        assert worker_group.worker_pid == pid and worker_group.generation == 0


@pytest.mark.usefixtures("forked")
async def test_a_range_beyond_the_vector_is_refused(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_test_worker_group(tmp_path, text) as (worker_group, _):
        numel = worker_group.layout.numel
        worker_group.delta.fill_(7.0)
        monkeypatch.setattr(InnerRunOptions, "check", lambda *_: None)  # the parent's own check
        for options in (
            InnerRunOptions(capture=((0, numel + 1),)),
            InnerRunOptions(capture=((numel, numel + 8),)),
            InnerRunOptions(begin="local", mix=((0, 1 << 40),), capture=()),
        ):
            with pytest.raises(StageRefused, match="leaves the flat vector"):
                await worker_group.inner_steps([(0, 4)], 0, HOUR_S, options=options)
        assert bool((worker_group.delta == 7.0).all()) and worker_group.generation == 0


def test_a_worker_cannot_cut_off_the_shared_memory(tmp_path: Path) -> None:
    """The network process would die of SIGBUS at its next read."""
    buffer = SharedBuffer.create(tmp_path, 1 << 20)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError), open(buffer.fd, "r+b", closefd=False) as memory:
            memory.truncate(size)
    buffer.tensor[-1] = 5.0
    assert buffer.tensor[-1] == 5.0
    buffer.close()


_CUTS_OFF = """
import os, sys
from peer.ipc.early_maps import map_early, mapped
fd = int(sys.argv[1])
map_early(fd)
from peer.ipc.shared_memory import SharedBuffer
tensor = SharedBuffer.attach(fd, 1 << 20).tensor
assert tensor[-1] == 5.0
tensor[0] = 7.0
for number in os.listdir("/proc/self/fd"):
    try:
        os.ftruncate(int(number), 0)
    except OSError:
        pass
"""


def test_a_worker_cannot_cut_off_a_shared_file(tmp_path: Path) -> None:
    """Files cannot be sealed: it has no descriptor of one any more when the first command of others reaches it."""
    buffer = SharedBuffer.create(tmp_path, 1 << 20, in_file=True)
    assert f"{tmp_path}/" in Path("/proc/self/maps").read_text() and not list(tmp_path.iterdir()), "without a name"
    buffer.tensor[-1] = 5.0
    command = [sys.executable, "-c", _CUTS_OFF, str(buffer.fd)]
    subprocess.run(command, pass_fds=[buffer.fd], cwd=Path(__file__).parents[3], check=True, timeout=500)
    assert os.fstat(buffer.fd).st_size == 4 << 20
    assert buffer.tensor[0] == 7.0 and buffer.tensor[-1] == 5.0
    buffer.close()


def test_a_shared_file_needs_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"4 MiB in .*: free some space or choose another --home"):
        SharedBuffer.create(tmp_path, 1 << 20, in_file=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forked")
async def test_a_worker_trains_alike_on_files_and_on_memory(tmp_path: Path, text: Path) -> None:
    deltas = []
    for in_files in (False, True):
        folder = tmp_path / str(in_files)
        folder.mkdir()
        async with open_test_worker_group(folder, text, vectors_in_files=in_files) as (worker_group, _):
            await worker_group.inner_steps([(0, 8)], 0, HOUR_S)
            deltas.append(worker_group.delta.clone())
    assert torch.equal(*deltas) and bool(deltas[0].any())
