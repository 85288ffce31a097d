"""Peers of several layouts and types in one run: one state, whatever a rank of theirs suffers, and a home that changes
its layout."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.peer_process import PeerProcess
from tests.swarm.support.pipeline_run import STAGES, open_pipeline
from tests.swarm.support.swarm_harness import RUN_TOML, open_swarm

PAIRED = RUN_TOML.replace("kv_heads = 1", "kv_heads = 2")  # for tp:2
LAYOUTS = {
    "alone": (),
    "copies": ("--devices", "cpu:2", "--layout", "ddp"),
    "shards": ("--devices", "cpu:2", "--layout", "fsdp"),
    "mixed": ("--devices", "cpu:4", "--layout", "fsdp:2,tp:2"),
}
ROUNDS = 4  # between two strikes


def ranks(peer: PeerProcess) -> list[int]:
    """The process ids of the peer's last group."""
    count = {"alone": 1, "mixed": 4}.get(peer.name, 2)
    return [int(fact.fields["pid"]) for fact in peer.all("worker_ready")[-count:]]


@pytest.mark.soak
async def test_four_layouts_commit_one_state(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, run=PAIRED, min_peers=4, steps=10) as swarm:
        peers = {name: swarm.join(name, *options) for name, options in LAYOUTS.items()}
        await swarm.committed(ROUNDS)
        for name, strike in (("copies", signal.SIGKILL), ("shards", signal.SIGSTOP), ("mixed", signal.SIGKILL)):
            peer = peers[name]
            mark = peer.mark()
            os.kill(ranks(peer)[-1], strike)
            await peer.wait_for("worker_died", since=mark)
            await peer.wait_for("worker_ready", since=mark)
            await swarm.committed(max(one.round for one in peers.values()) + ROUNDS)
        shards = peers["shards"]
        shards.interrupt()
        assert await shards.wait_exit() == 130
        shards.arguments = tuple("ddp" if word == "fsdp" else word for word in shards.arguments)
        swarm.restart(shards)
        await swarm.committed(max(one.round for one in swarm.living()) + ROUNDS)
        assert all(len(hashes) == 1 for hashes in swarm.hashes().values())


@pytest.mark.soak
async def test_stages_of_several_devices_commit_with_those_of_one(tmp_path: Path) -> None:
    """In each stage of a pipeline, two replicas of different layouts. Ranks are lost in the middle of micro-batches."""
    outer = '[outer]\nmethod = "diloco"\nsteps = 10'
    async with open_pipeline(tmp_path, outer, range(STAGES)) as pipeline:
        shared = [pipeline.join(stage, *LAYOUTS[("shards", "copies")[stage % 2]]) for stage in range(STAGES)]
        await pipeline.whole()
        for replica in shared:
            peer, mark = replica.peer, replica.peer.mark()
            os.kill(ranks(peer)[-1], signal.SIGKILL)
            await peer.wait_for("worker_died", since=mark)
            await peer.wait_for("worker_ready", since=mark)
            await pipeline.whole()
        assert all(len(peer.all("worker_ready")) == 4 for peer in (replica.peer for replica in shared))
        assert not pipeline.forks() and not pipeline.twice()


@pytest.mark.soak
async def test_steps_that_overflow_in_fp16_are_no_divergence(tmp_path: Path) -> None:
    """The text of one peer is one letter, so all tokens have the same gradient: their sum is beyond fp16 at the first
    scale of the loss."""
    letters = tmp_path / "letters"
    letters.mkdir()
    (letters / "a.txt").write_text("a" * 100_000)
    rounds = 6
    async with open_swarm(tmp_path, rounds=rounds, min_peers=2, steps=5) as swarm:
        wide = swarm.join("wide", "--dtype", "fp32")
        narrow = swarm.join("narrow", "--dtype", "fp16", "--data", str(letters))
        for peer in (wide, narrow):
            await peer.wait_for("run_finished")
        assert wide.state_hash == narrow.state_hash and wide.round == rounds
        swarm.check_agreement()
        facts = {peer.name: [fact.fields for fact in peer.all("round_committed")] for peer in (wide, narrow)}
        overflows = {name: [int(of["overflows"]) for of in rounds] for name, rounds in facts.items()}
        assert overflows["narrow"][0] > 0 and not any(overflows["wide"]), overflows
        assert not any(int(of["skipped"]) for rounds in facts.values() for of in rounds)
        assert not narrow.all("steps_skipped") and not narrow.all("worker_failed")
        (ready,) = narrow.all("worker_ready")
        assert ready.fields["fp16"] and not ready.fields["bf16"]


@pytest.mark.soak
async def test_stages_in_fp16_commit_with_those_in_fp32(tmp_path: Path) -> None:
    """In each stage of a pipeline, a replica in fp16 beside one in fp32."""
    outer = '[outer]\nmethod = "diloco"\nsteps = 10'
    async with open_pipeline(tmp_path, outer, range(STAGES)) as pipeline:
        narrow = [pipeline.join(stage, "--dtype", "fp16") for stage in range(STAGES)]
        await pipeline.whole()
        await pipeline.whole()
        for replica in narrow:
            trained = [fact.fields for fact in replica.peer.all("round_committed")]
            assert trained and not any(int(of["skipped"]) for of in trained)
        assert not pipeline.forks() and not pipeline.twice()
