"""The "blocks" program in this process: a slow reader, and parameters that do not fit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from peer.errors import ConfigError
from peer.ipc.block_messages import (
    ComputeTokens,
    LoadBlocks,
    OpenSession,
    RingEnds,
    SessionOpened,
    SpanOutput,
    pack,
    unpack_from_worker,
)
from peer.ipc.messages import ModelLoaded
from peer.ipc.ring import Ring
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span
from peer.worker.block_worker import BlockWorker, parameters_of
from tests.peer.inference.golden_models import prompt_of, reference
from tests.peer.inference.test_golden import model_of

RING_BYTES = 4096
NONE = RingEnds((-1, -1, -1), 0)


class Stopped(Exception):
    """Ends the worker."""


class Link:
    """Stands in for the control link."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.stopped = False
        self._ticks = 0

    def emit(self, name: str, /, **fields: Any) -> None:
        """Take how far the parameters have been loaded, which is of no interest here."""

    @property
    def ticks(self) -> int:
        if self.stopped:
            raise Stopped
        return self._ticks

    @ticks.setter
    def ticks(self, ticks: int) -> None:
        self._ticks = ticks

    def send(self, message: object) -> None:
        self.sent.append(message)


def load_of(folder: Path, span: Span, **changes: Any) -> LoadBlocks:
    config, window, _ = model_of("llama3")
    values: dict[str, Any] = {
        "model": config,
        "span": span,
        "dtype": "fp32",
        "window": window,
        "folders": (str(folder),),
        "directory": str(folder),
        "device": "cpu",
        "pages": 100,
        "rows_max": 4,
        "chunk_tokens": 8,
        "to_worker": NONE,
        "from_worker": NONE,
    }
    return LoadBlocks(**{**values, **changes})


def written(folder: Path, **changes: torch.Tensor) -> Path:
    """Write the parameters of the tiny model, some of them changed."""
    save_file({**reference("llama3").state_dict(), **changes}, folder / "model.safetensors")
    return folder


@contextmanager
def running(folder: Path, span: Span) -> Iterator[tuple[Ring, Ring, BlockWorker, LoadBlocks]]:
    """A worker in a thread of its own; both ends of its rings are ours."""
    rings = Ring.create(folder, RING_BYTES), Ring.create(folder, RING_BYTES)
    ends = [RingEnds(tuple(map(os.dup, ring.fds)), RING_BYTES) for ring in rings]  # type: ignore[arg-type]
    load, link = load_of(written(folder), span, to_worker=ends[0], from_worker=ends[1]), Link()
    worker: Any = BlockWorker(link, load)  # type: ignore[arg-type]
    assert [type(message) for message in link.sent] == [ModelLoaded]

    def run() -> None:
        with pytest.raises(Stopped):
            worker.run()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield *rings, worker, load
    finally:
        link.stopped = True
        thread.join(60)
        for ring in (*rings, worker._incoming, worker._outgoing):
            ring.close()
    assert not thread.is_alive()


def test_a_reader_that_is_slow_misses_no_output(tmp_path: Path) -> None:
    """An output of eight hidden states takes a kilobyte, and the ring four."""
    prompt = prompt_of(200)
    with running(tmp_path, Span(0, 2, 3)) as (to_worker, from_worker, worker, load):
        assert to_worker.put(pack(OpenSession(1, Sampling())))
        assert to_worker.put(pack(ComputeTokens(1, 0, 200, tuple(prompt), False)))
        deadline = time.monotonic() + 60
        left = [200]
        while len(left) < 4 or len(set(left[-3:])) > 1:  # until it stands still, for want of room
            assert time.monotonic() < deadline
            session = len(left) + 1
            assert to_worker.put(pack(OpenSession(session, Sampling())))
            while worker._engine.sessions < session:  # it reads on: a writer may wait for room in the other ring
                assert time.monotonic() < deadline
                time.sleep(0.001)
            left.append(worker._engine.waiting_tokens)
        assert worker._unsent and left[-1] > 100, "it made no steps whose outputs have no room"
        found: list[tuple[Any, bytes]] = []
        while sum(message.count for message, _ in found if isinstance(message, SpanOutput)) < 200:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            found += [unpack_from_worker(record, load) for record in from_worker.take()]
            from_worker.done()
    outputs = [(message, payload) for message, payload in found if isinstance(message, SpanOutput)]
    assert SessionOpened(1, 0) in [message for message, _ in found]
    assert [message.position for message, _ in outputs] == list(range(0, 200, 8))
    assert [id for message, _ in outputs for id in message.ids] == prompt
    hidden = torch.frombuffer(bytearray(b"".join(payload for _, payload in outputs)), dtype=torch.float32)
    with torch.no_grad():
        wanted = reference("llama3")(torch.tensor([prompt]), output_hidden_states=True).hidden_states[2][0]
    assert torch.allclose(hidden.view(200, 32), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(47, 32)},
            r"up_proj\.weight in .* has shape \(47, 32\), not",
        ),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, r"model\.norm\.weight in .* is of the type int8"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, torch.Tensor], words: str) -> None:
    source = parameters_of(load_of(written(tmp_path, **changes), Span(1, 3, 3)))
    with pytest.raises(ConfigError, match=words):
        source(next(iter(changes)))
    assert source("model.layers.2.mlp.up_proj.weight").shape == (48, 32)


def test_what_is_missing_is_known_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds model\.embed_tokens\.weight: name a folder"):
        parameters_of(load_of(tmp_path, Span(0, 1, 3)))
    tied = msgspec.structs.replace(model_of("llama3")[0], tie_embeddings=True)
    weights = dict(reference("llama3").state_dict())
    save_file({name: weights[name] for name in weights if "embed" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds model\.embed_tokens\.weight: name a folder"):
        parameters_of(load_of(tmp_path, Span(1, 3, 3), model=tied))
    parameters_of(load_of(tmp_path, Span(1, 3, 3)))
    with pytest.raises(ConfigError, match="the model has 3 blocks"):
        parameters_of(load_of(tmp_path, Span(1, 3, 4)))


def test_parameters_are_copies_in_the_type_to_compute_in(tmp_path: Path) -> None:
    """A file that is written again must not change the weights."""
    name = "model.norm.weight"
    norm = parameters_of(load_of(written(tmp_path), Span(1, 3, 3)))(name)
    before = norm.clone()
    with open(tmp_path / "model.safetensors", "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert torch.equal(norm, before)
    half = parameters_of(load_of(written(tmp_path, **{name: before.half()}), Span(1, 3, 3), dtype="bf16"))(name)
    assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), before, atol=0.01)
