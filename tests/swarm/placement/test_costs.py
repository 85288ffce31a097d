"""The host's bytes, against the buffers and stores of the network process, and against those of the design."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optim.config import CodecConfig, DilocoConfig
from optim.strategies.registry import build_strategy
from optim.wire_sizes import exchange_of
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.events import EventLog
from peer.footprint import kept
from peer.footprint.device import device_items
from peer.footprint.host import disk_items, host_items
from peer.footprint.workload import Workload
from peer.model.layout import FlatLayout
from peer.worker.config import WorkerBuffers, WorkerConfig
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore
from tests.swarm.support.donor_child import generation

MODEL = ModelConfig(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=96, max_seq_len=32)
LARGE = ModelConfig(hidden_size=2048, layers=16, heads=32, kv_heads=8, intermediate_size=8192, max_seq_len=2048)
INNER = InnerConfig(lr=1e-3, batch_size=2, total_steps=10)


def workload(model: ModelConfig) -> Workload:
    return Workload(
        model=model,
        inner=INNER,
        exchange=exchange_of(DilocoConfig(steps=10), CodecConfig(), FlatLayout.of(model).shapes, peers=4),
        blocks=range(model.layers),
        seq_len=32,
        sequences=2,
    )


def test_the_vectors_of_the_network_process_are_counted_to_the_byte(tmp_path: Path) -> None:
    layout, items = FlatLayout.of(MODEL), host_items(workload(MODEL))
    config = WorkerConfig(MODEL, DataConfig(seq_len=32), INNER, tmp_path, EventLog())
    with WorkerBuffers.open(config) as buffers:
        outer, delta = (buffer.tensor.untyped_storage().nbytes() for buffer in (buffers.outer, buffers.delta))
    assert items["shared with the worker: outer weights, product"] == outer + delta
    strategy = build_strategy(DilocoConfig(steps=10), CodecConfig(), layout, INNER)
    state = OuterState.in_memory([torch.zeros(layout.numel) for _ in range(2)], strategy)
    assert items["state"] == items["next state"] == state.size_bytes


def test_snapshots_and_results_are_counted_as_the_store_keeps_them() -> None:
    """A small state: many snapshots and results are kept of it."""
    work, items = workload(MODEL), host_items(workload(MODEL))
    store, result = SnapshotStore(work.state_bytes, 1 << 20), bytes(int(work.exchange.result * work.parameters))
    vectors = [torch.zeros(work.parameters) for _ in range(2)]
    for round in range(80):
        vectors[0][0] = round
        store.publish(generation([vector.clone() for vector in vectors]), b"", [result])
    held = sum(snapshot.bytes.size for snapshot in store._snapshots)
    assert held == items["state"] + items["states kept for joiners"]
    held = sum(result.size_bytes for result in store._results.values())
    assert held == pytest.approx(items["small results kept"], rel=0.05)


def test_a_large_model_takes_what_the_design_counts() -> None:
    """Bytes a parameter, of DiLoCo with int8 and AdamW."""
    work = workload(LARGE)
    a_parameter = {name: size / work.parameters for name, size in host_items(work).items()}
    assert a_parameter["state"] == a_parameter["next state"] == 8
    assert "states kept for joiners" not in a_parameter
    assert a_parameter["merged result of the round"] == pytest.approx(1, rel=0.02)
    assert a_parameter["exchange of the round"] == pytest.approx(1.75, rel=0.02)
    on_disk = (5 + kept.SNAPSHOTS) * 8 + 2 * 8 + kept.RESULTS + kept.AUDITED * 1.75
    assert sum(disk_items(work).values()) / work.parameters == pytest.approx(on_disk, rel=0.02)


def test_the_readme_says_what_is_counted() -> None:
    """Of a large model with DiLoCo, int8 and AdamW, without programs and activations."""
    work = replace(workload(LARGE), exchange=exchange_of(DilocoConfig(steps=10), CodecConfig(), (), peers=8))
    host = sum(size for name, size in host_items(work).items() if name != "programs")
    state = {"weights", "gradient", "inner optimizer"}
    device = sum(size for name, size in device_items(work).items() if name in state)
    narrow = device + device_items(replace(work, narrow=True, sequences=64))["16-bit copies of weights"]
    wanted = tuple(str(round(size / work.parameters)) for size in (host, narrow, host + device))
    said = re.search(
        r"about (\d+) bytes a parameter of memory and (\d+) of the device, (\d+) where both",
        (Path(__file__).parents[3] / "README.md").read_text(),
    )
    assert said is not None and said.groups() == wanted
