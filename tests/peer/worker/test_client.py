"""The compute worker as a real child process: what it computes, and what happens when it or its parent dies."""

from __future__ import annotations

import gc
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
import torch
import trio

from peer.catalogue.reading import heard
from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.config import DataConfig
from peer.corpus_facts import CorpusFacts
from peer.data.text_corpus import load_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError, WorkerError
from peer.events import Event
from peer.footprint.step_size import SMALLEST
from peer.ipc.shared_memory import SharedBuffer
from peer.model.layout import init_flat
from peer.worker.client import WorkerGroup, open_worker_group
from tests.peer.support.worker_harness import (
    ENDLESS,
    HOUR_S,
    INNER,
    MODEL,
    Log,
    hit,
    open_test_worker_group,
    saved_state,
    worker_config,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        sys.platform != "linux", reason="process supervision is tested through Linux's /proc and pidfds"
    ),
]


async def _gone(pidfd: int, timeout_s: float = 60.0) -> None:
    """Wait until the process behind the descriptor is dead."""
    with trio.fail_after(timeout_s):
        await trio.lowlevel.wait_readable(pidfd)
    os.close(pidfd)


@pytest.mark.usefixtures("forked")
async def test_it_tells_what_text_it_has_read(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "text"
    shutil.copytree(text, folder)
    (folder / "notes.docx").write_bytes(b"")
    os.mkfifo(folder / "pipe.txt")
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("a name that is not UTF-8\n")
    config = worker_config(tmp_path, folder)
    told: list[Event] = []
    with config.events.subscribed(told.append):
        async with open_worker_group(config):
            pass
    (fields,) = (event.fields for event in told if event.name == "corpus_read")
    here = load_corpus(config.data, ByteTokenizer(), str(folder)).facts
    read = heard(1.0, "corpus_read", fields)
    assert read is not None and read.event == here.event() and CorpusFacts.of(here.event()) == here and here.files == 21
    assert "skipped 1 .docx, 1 not regular" in here.account


@pytest.mark.usefixtures("forked")
async def test_too_little_text_is_refused_with_what_was_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "text.log").write_text("text " * 1000)
    with pytest.raises(ConfigError, match=r"too little text.*skipped 1 \.log; suffixes read .*: add text"):
        async with open_worker_group(worker_config(tmp_path, folder)):
            pass


@pytest.mark.usefixtures("forked")
async def test_it_trains_and_evaluates(tmp_path: Path, text: Path) -> None:
    async with open_test_worker_group(tmp_path, text) as (worker_group, log):
        assert worker_group.loaded is not None and worker_group.loaded.windows > 100
        assert math.isclose(await worker_group.evaluate(), math.log(256), rel_tol=0.02)
        worker_group.delta.copy_(worker_group.outer)
        losses = await worker_group.evaluate_delta(2)
        assert len(losses) == 2 and math.isclose(fmean(losses), await worker_group.evaluate(2), rel_tol=1e-4)

        # the same steps in this process, bit for bit
        result = await worker_group.inner_steps([(0, 10), (500, 530)], first_step=3, deadline_s=HOUR_S)
        assert (result.steps, result.sequences, result.tokens, result.skipped) == (10, 40, 1280, 0)
        torch.set_num_threads(1)
        corpus = load_corpus(worker_group.config.data, ByteTokenizer(), str(text))
        assert corpus.digest == worker_group.loaded.corpus_digest
        trainer = InnerTrainer(MODEL, INNER, resolve_device("cpu"))
        init_flat(MODEL, seed=0, out=trainer.local)
        numbers = [*range(10), *range(500, 530)]
        losses = [trainer.step(corpus.batch(numbers[4 * k : 4 * k + 4], 0), 3 + k).loss for k in range(10)]
        assert math.isclose(result.loss, sum(losses) / 10, rel_tol=1e-6)
        assert torch.equal(worker_group.delta, init_flat(MODEL, seed=0) - trainer.local)
        assert torch.equal(worker_group.outer, init_flat(MODEL, seed=0))  # only the network process changes it
        saved = torch.zeros_like(saved_state(worker_group))
        trainer.optimizer.save(saved)
        assert torch.equal(saved_state(worker_group), saved) and trainer.optimizer.steps == 10

        # bounds, and a command that its caller gave up
        assert (await worker_group.inner_steps(ENDLESS, 0, HOUR_S, steps=3)).steps == 3
        await worker_group.inner_steps(ENDLESS, 0, 0.2)  # returns
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_after_progress, worker_group, log)
            assert (await worker_group.inner_steps(ENDLESS, 0, HOUR_S)).steps > 0
        worker_group.stop_inner()  # nothing runs: nothing to stop
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker_group.inner_steps, ENDLESS, 0, HOUR_S)
            await log.wait_for("inner_step")
            nursery.cancel_scope.cancel()
        assert math.isfinite(await worker_group.evaluate(1))  # the worker is free

        # one outer step with these deltas lowers the held-out loss
        await worker_group.inner_steps([(0, 400)], 0, HOUR_S)
        worker_group.outer.sub_(worker_group.delta)
        assert await worker_group.evaluate() < 4.0


async def _stop_after_progress(worker_group: WorkerGroup, log: Log) -> None:
    event = await log.wait_for("inner_step")
    assert event.fields["loss"] and event.fields["tokens_per_s"]
    worker_group.stop_inner()


async def test_closing_leaves_no_process_and_no_descriptor(tmp_path: Path, text: Path) -> None:
    async def use_one() -> int:
        async with open_test_worker_group(tmp_path, text) as (worker_group, _):
            assert worker_group.worker_pid is not None
            return os.pidfd_open(worker_group.worker_pid)

    gc.collect()  # what other tests have left
    before = set(os.listdir("/proc/self/fd"))
    await _gone(await use_one())
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("forked")
async def test_a_killed_and_a_frozen_worker_are_replaced(tmp_path: Path, text: Path) -> None:
    async with open_test_worker_group(tmp_path, text, silence_s=8.0) as (worker_group, log):
        await worker_group.inner_steps([(0, 40)], 0, HOUR_S)
        first = worker_group.worker_pid
        words = await hit(worker_group, log, lambda pid: os.kill(pid, signal.SIGKILL))
        assert "killed by SIGKILL" in words
        assert math.isfinite(await worker_group.evaluate(1))  # waited for the new worker
        second = worker_group.worker_pid
        assert second != first and torch.equal(worker_group.outer, init_flat(MODEL, seed=0))
        with trio.fail_after(300):
            words = await hit(worker_group, log, lambda pid: os.kill(pid, signal.SIGSTOP))
        assert "silent for 8 s" in words
        assert math.isfinite(await worker_group.evaluate(1))
        assert worker_group.worker_pid not in (first, second)
        for pid in (first, second):
            assert not os.path.exists(f"/proc/{pid}")  # reaped, no zombie


@pytest.mark.usefixtures("forked")
async def test_an_out_of_memory_worker_is_reported(tmp_path: Path, text: Path) -> None:
    # One sequence takes tensors of 64 MiB: these come from the kernel, never from what the process has set aside, and
    # no smaller step is left to try. The first one imports what such a step needs.
    model = msgspec.structs.replace(MODEL, hidden_size=8, layers=1, heads=1, intermediate_size=1 << 16, max_seq_len=256)
    large = {"model": model, "data": DataConfig(source="folder", seq_len=256), "step_size": SMALLEST}
    inner = msgspec.structs.replace(INNER, batch_size=1)
    async with open_test_worker_group(tmp_path, text, inner=inner, **large) as (worker_group, _):
        assert (await worker_group.inner_steps([(0, 1)], 0, HOUR_S)).steps == 1
        used = int(Path(f"/proc/{worker_group.worker_pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.prlimit(worker_group.worker_pid or 0, resource.RLIMIT_AS, (used, used))
        with pytest.raises(WorkerError, match=r"exited with code 1: .*(?i:alloc|memory)"):
            await worker_group.inner_steps(ENDLESS, 0, HOUR_S)
        assert (await worker_group.inner_steps([(0, 1)], 0, HOUR_S)).steps == 1


@pytest.mark.usefixtures("forked")
async def test_a_worker_that_makes_no_step_is_replaced(tmp_path: Path, text: Path) -> None:
    """A step of several seconds stands for one that never ends: the process lives and beats, the count stays."""
    heavy = msgspec.structs.replace(MODEL, hidden_size=768, layers=2, intermediate_size=2048)
    inner = msgspec.structs.replace(INNER, batch_size=256)
    async with open_test_worker_group(tmp_path, text, model=heavy, inner=inner, stall_s=0.5) as (worker_group, _):
        with pytest.raises(WorkerError, match=r"no step for 0\.5 s"):
            await worker_group.inner_steps(ENDLESS, 0, HOUR_S)


@pytest.mark.usefixtures("forked")
async def test_an_unusable_configuration_is_refused_at_once(tmp_path: Path, text: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        async with open_worker_group(worker_config(tmp_path, tmp_path / "no")):
            pass
    small = msgspec.structs.replace(MODEL, vocab_size=255)
    with pytest.raises(ConfigError, match=r"raise model\.vocab_size"):
        async with open_worker_group(worker_config(tmp_path, text, model=small)):
            pass
    with pytest.raises(WorkerError, match="raise load_timeout_s"):
        async with open_worker_group(worker_config(tmp_path, text, load_timeout_s=0.0)):
            pass


@pytest.mark.usefixtures("forked")
async def test_a_failed_restart_is_retried(tmp_path: Path, text: Path) -> None:
    own = tmp_path / "text"
    own.mkdir()
    (own / "a.txt").write_text("some text to train on\n" * 500)
    async with open_test_worker_group(tmp_path, own) as (worker_group, log):
        own.rename(tmp_path / "away")
        await hit(worker_group, log, lambda pid: os.kill(pid, signal.SIGKILL))
        with pytest.raises(WorkerError, match="does not exist"):
            await worker_group.evaluate()
        (tmp_path / "away").rename(own)
        with trio.fail_after(500):  # the start of a process
            await log.wait_for("worker_ready")
        assert math.isfinite(await worker_group.evaluate())


PARENT = """
import sys, trio
from pathlib import Path
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.events import EventLog
from peer.footprint.layout import Compute
from peer.ipc.corpus_messages import OwnText
from peer.worker.client import open_worker_group
from peer.worker.config import WorkerConfig

async def main():
    configs = [WorkerConfig(
        model=ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=48, max_seq_len=32),
        data=DataConfig(source="folder", seq_len=32), text=OwnText(sys.argv[2]),
        inner=InnerConfig(lr=1e-2, batch_size=4, total_steps=1000, dtype="fp32"),
        directory=Path(sys.argv[1]) / name, events=EventLog(), compute=Compute("cpu", threads=1),
    ) for name in ("frozen", "busy")]
    async with open_worker_group(configs[0]) as frozen, open_worker_group(configs[1]) as busy:
        print(frozen.worker_pid, busy.worker_pid, flush=True)
        await busy.inner_steps([(0, 10**9)], 0, 3600.0)

trio.run(main)
"""


async def test_no_worker_outlives_its_parent(tmp_path: Path, text: Path) -> None:
    """A frozen one cannot see its control socket end: then only the kernel's parent-death signal reaches it."""
    for name in ("frozen", "busy"):
        (tmp_path / name).mkdir()
    house = str(Path(__file__).parents[3])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(text)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": house},
    )
    assert parent.stdout is not None
    with parent.stdout:
        frozen, busy = map(int, (await trio.to_thread.run_sync(parent.stdout.readline)).split())
    pidfds = [os.pidfd_open(worker) for worker in (frozen, busy)]
    os.kill(frozen, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    for pidfd in pidfds:
        await _gone(pidfd)


async def test_a_worker_ends_with_its_control_socket(tmp_path: Path) -> None:
    """Where the kernel has no parent-death signal, this is what ends an orphan."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "peer.worker.main", str(theirs.fileno()), str(os.getpid()), "10"]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[3])
    ours.close()
    with trio.fail_after(500):  # the start of a process
        assert await trio.to_thread.run_sync(worker.wait) == 0


def test_shared_memory_has_no_name_and_no_leak(tmp_path: Path) -> None:
    gc.collect()  # what other tests have left
    descriptors = set(os.listdir("/proc/self/fd"))
    buffer = SharedBuffer.create(tmp_path, 1 << 20)
    other = SharedBuffer.attach(os.dup(buffer.fd), 1 << 20)
    buffer.tensor[-1] = 5.0
    assert other.tensor[-1] == 5.0 and not other.tensor[:-1].any()
    assert os.fstat(buffer.fd).st_nlink == 0 and not os.listdir(tmp_path)
    tensor = other.tensor
    buffer.close()
    other.close()
    other.close()
    assert tensor[-1] == 5.0  # a holder of the tensor may still read it
    del tensor
    assert set(os.listdir("/proc/self/fd")) == descriptors
