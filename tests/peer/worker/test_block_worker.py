"""Real worker processes that serve spans of tiny models: their tokens, their refusals, their loss."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peer.errors import ConfigError, StageRefused, WorkerError
from peer.footprint.parameters import parameter_shapes
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.ipc.block_messages import (
    CloseSession,
    ComputeTokens,
    OpenSession,
    RewindSession,
    SessionOpened,
    SpanOutput,
    StepRefusal,
)
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span
from peer.model.hub_config import read_served_config
from peer.worker.block_client import BlockConfig, BlockWorkerGroup
from tests.peer.inference.golden_models import expected, prompt_of, reference
from tests.peer.inference.test_golden import model_of
from tests.peer.support.echo_worker import BadBlockWorker
from tests.peer.support.worker_harness import Log, freeze

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="a process is stopped and examined as on Linux"),
]
WIDTH = 32


def checkpoint(folder: Path, family: str, shard: str = "5GB") -> Path:
    """Write a tiny random model as `transformers` does."""
    reference(family).save_pretrained(folder / family, max_shard_size=shard)
    return folder / family


def config_of(folder: Path, weights: Path, span: Span | None = None, **changes: Any) -> BlockConfig:
    model, window = read_served_config((weights / "config.json").read_bytes())
    values: dict[str, Any] = {
        "model": model,
        "span": span or Span.whole(model.layers),
        "dtype": "fp32",
        "window": window,
        "folders": (weights,),
        "directory": folder,
        "events": Log(),
        "device": "cpu",
        "threads": 1,
        "pages": 400,
    }
    return BlockConfig(**{**values, **changes})


def own_files(weights: Path, folder: Path, span: Span) -> Path:
    """Copy only the files that hold parameters of the span."""
    model, _ = read_served_config((weights / "config.json").read_bytes())
    places = json.loads((weights / "model.safetensors.index.json").read_bytes())["weight_map"]
    names = [name for name, _ in parameter_shapes(model, span.blocks)]
    if span.is_last and model.tie_embeddings:
        names.append("model.embed_tokens.weight")
    wanted = {places[name] for name in names}
    assert 0 < len(wanted) < len(set(places.values())), "some files are not needed"
    folder.mkdir()
    for name in {*wanted, "config.json"}:
        shutil.copy(weights / name, folder / name)
    return folder


async def generate(groups: Sequence[BlockWorkerGroup], session: int, prompt: list[int], tokens: int) -> list[int]:
    """Generate through workers that follow each other."""
    said: list[int] = []
    for group in groups:
        group.send(OpenSession(session, Sampling()))
        assert await group.receive() == [(SessionOpened(session, 0), b"")]
    position, ids = 0, tuple(prompt)
    while len(said) < tokens:
        groups[0].send(ComputeTokens(session, position, len(ids), ids, True))
        end, position = position + len(ids), position + len(ids)
        for group, behind in zip(groups, [*groups[1:], None], strict=True):
            done = end - len(ids)
            while done < end:
                for output, payload in await group.receive():
                    assert isinstance(output, SpanOutput) and output.position == done, output
                    done += output.count
                    if behind is not None:
                        step = ComputeTokens(session, output.position, output.count, output.ids, done == end)
                        behind.send(step, payload)
        assert isinstance(output, SpanOutput) and output.token is not None
        said.append(output.token)
        ids = (output.token,)
    return said


async def answers(group: BlockWorkerGroup, count: int) -> list[Any]:
    """Wait for so many records, and return their messages."""
    found: list[Any] = []
    while len(found) < count:
        found += [message for message, _ in await group.receive()]
    return found


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
async def test_two_workers_say_what_transformers_says(tmp_path: Path, family: str) -> None:
    """Each with its own files alone; the head of "qwen2" is the embedding. The prompt takes two chunks."""
    weights, spans = checkpoint(tmp_path, family, "12KB"), (Span(0, 1, 3), Span(1, 3, 3))
    folders = [own_files(weights, tmp_path / f"files-{span.first}", span) for span in spans]
    first, second = (
        config_of(tmp_path / f"home-{span.first}", folder, span) for span, folder in zip(spans, folders, strict=True)
    )
    async with BlockWorkerGroup.open(first) as one, BlockWorkerGroup.open(second) as other:
        assert await generate([one, other], 1, prompt_of(300), 24) == expected(family, 300, 24)
        assert one.device == other.device == "CPU" and one.generation == 0
        assert other.load is not None and (other.load.sessions, other.load.waiting_tokens) in {(0, 0), (1, 0)}


async def test_what_the_engine_refuses_is_told(tmp_path: Path) -> None:
    span = Span(1, 3, 3)
    async with BlockWorkerGroup.open(config_of(tmp_path, checkpoint(tmp_path, "llama3"), span, pages=6)) as group:
        ones = torch.ones(1, WIDTH)
        nan = ones.index_fill(1, torch.tensor([3]), float("nan"))

        def compute(session: int, position: int, hidden: torch.Tensor, *ids: int) -> None:
            step = ComputeTokens(session, position, len(ids), ids, True)
            group.send(step, hidden.numpy().tobytes())

        group.send(OpenSession(1, Sampling()))
        compute(1, 0, torch.ones(17, WIDTH), *range(17))  # takes two pages
        opened, output = await answers(group, 2)
        assert opened == SessionOpened(1, 0) and output.token is not None and output.ids == tuple(range(17))
        compute(1, 18, ones, 5)
        compute(1, 17, nan, 5)
        compute(1, 17, ones, 199)
        compute(1, 17, ones[:, :31], 5)
        compute(1, 17, ones, 5, 6)
        compute(2, 0, ones, 5)
        group.send(OpenSession(3, Sampling(), (), 0, 2))
        group.send(RewindSession(1, 99))
        refusals = await answers(group, 8)
        assert all(isinstance(refusal, StepRefusal) for refusal in refusals)
        assert [(refusal.session, refusal.cause, refusal.have) for refusal in refusals] == [
            (1, "gap", 17),
            (1, "not_finite", 17),
            (1, "value", 17),
            (1, "shape", 17),
            (1, "shape", 17),
            (2, "unknown", 0),
            (3, "value", 0),
            (1, "gap", 17),
        ]
        group.send(OpenSession(4, Sampling()))
        compute(4, 0, torch.ones(81, WIDTH), *range(81))
        opened, refusal = await answers(group, 2)
        assert opened == SessionOpened(4, 0)
        assert (refusal.session, refusal.cause, refusal.have) == (4, "full", 0)
        compute(1, 17, ones, 5)  # the other session goes on
        (output,) = await answers(group, 1)
        assert (output.session, output.position) == (1, 17) and output.token is not None


async def test_a_lost_worker_is_told_once_and_replaced(tmp_path: Path) -> None:
    """The sessions of the next one are computed with the window of the model."""
    async with BlockWorkerGroup.open(config_of(tmp_path, checkpoint(tmp_path, "mistral"))) as group:
        assert await generate([group], 1, prompt_of(64), 8) == expected("mistral", 64, 8)
        lost = group.worker_pid
        with trio.fail_after(300):  # the load is told when it has changed
            async with trio.open_nursery() as nursery:
                nursery.start_soon(group.receive)
                while group.load is None or group.load.pages_free != 400 - 8:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        assert lost is not None and group.load.sessions == 1 and group.load.rows == 1 and group.load.step_ms > 0
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            await group.receive()
        assert group.generation == 1
        with trio.fail_after(120):
            await group.ready()
        assert group.worker_pid != lost
        assert await generate([group], 2, prompt_of(64), 8) == expected("mistral", 64, 8)
        os.kill(group.worker_pid or 0, signal.SIGKILL)
        with trio.fail_after(120):
            while group.generation == 1:
                await trio.sleep(0.01)
            await group.ready()
        with pytest.raises(WorkerError, match="open the sessions again"):
            group.send(OpenSession(3, Sampling()))  # it would be taken for one of the lost worker
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            await group.receive()
        group.send(OpenSession(3, Sampling()))
        assert await answers(group, 1) == [SessionOpened(3, 0)]


async def test_a_full_ring_takes_no_more_but_ends_of_sessions(tmp_path: Path) -> None:
    async with BlockWorkerGroup.open(config_of(tmp_path, checkpoint(tmp_path, "llama3"))) as group:
        for session in (1, 2):
            group.send(OpenSession(session, Sampling()))
        await answers(group, 2)
        pid = group.worker_pid
        assert pid is not None
        freeze(pid)
        sent = 0
        for unknown in (ComputeTokens(9, 0, 100_000, (7,) * 100_000, False), RewindSession(9, 0)):
            with pytest.raises(StageRefused) as refused:
                while sent < 50_000:
                    group.send(unknown)
                    sent += 1
            assert refused.value.reason == "full" and sent > 1
        group.send(CloseSession(1))
        group.send(CloseSession(2))
        os.kill(pid, signal.SIGCONT)
        assert [refusal.cause for refusal in await answers(group, sent)] == ["unknown"] * sent
        group.send(OpenSession(1, Sampling()))  # the ends come before it
        assert await answers(group, 1) == [SessionOpened(1, 0)]


async def test_bf16_and_a_part_of_the_span(tmp_path: Path) -> None:
    model, (config, window, _) = reference("llama3"), model_of("llama3")
    weights = {name: value.bfloat16() for name, value in model.state_dict().items()}
    blocks = SpanBlocks(config, Span.whole(3), weights.__getitem__, torch.device("cpu"), window)
    engine = Engine(blocks, 400)
    prompt = tuple(prompt_of(17))
    async with BlockWorkerGroup.open(config_of(tmp_path, checkpoint(tmp_path, "llama3"), dtype="bf16")) as group:
        for session, part in ((1, (0, 2)), (2, (0, 3))):
            engine.open(session, Sampling(), (), part)
            engine.submit(session, 0, prompt, None, samples=True)
            (mine,) = engine.step()
            group.send(OpenSession(session, Sampling(), (), *part))
            group.send(ComputeTokens(session, 0, 17, prompt, True))
            records = list[tuple[Any, bytes]]()
            while len(records) < 2:
                records += await group.receive()
            theirs, payload = records[1]
            assert isinstance(theirs, SpanOutput) and theirs.token == mine.token and theirs.ids == prompt
            if mine.hidden is not None:
                assert len(payload) == 17 * WIDTH * 2 and mine.hidden.dtype == torch.bfloat16
                hidden = torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).view(17, WIDTH)
                assert torch.allclose(hidden, mine.hidden, atol=0.02, rtol=0.02)
        assert mine.token is not None
        with torch.no_grad():
            whole = model(torch.tensor([prompt])).logits[0, -1]
        assert mine.token in whole.topk(3).indices, "near what fp32 says"


async def test_a_missing_parameter_is_one_sentence(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, "llama3", "12KB")
    places = json.loads((weights / "model.safetensors.index.json").read_bytes())["weight_map"]
    (weights / places["model.layers.1.mlp.up_proj.weight"]).unlink()
    with pytest.raises(ConfigError, match=r"holds model\.layers\.1\.[\w.]+: name a folder with the files of blocks"):
        async with BlockWorkerGroup.open(config_of(tmp_path, weights, Span(1, 3, 3))):
            pass
    assert "Traceback" not in (tmp_path / "worker.log").read_text()


async def test_a_bad_worker_ends_and_we_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends what is no record, then one that never ends a step."""
    monkeypatch.setattr("peer.worker.process._MODULE", "tests.peer.support.echo_worker")
    config = config_of(tmp_path, checkpoint(tmp_path, "llama3"), stall_s=5.0)
    async with BlockWorkerGroup.open(config) as group:
        for number, (session, cause) in enumerate(
            [(BadBlockWorker.MALFORMED, "malformed message"), (BadBlockWorker.STUCK, "made no step for 5 s")], start=1
        ):
            pid = group.worker_pid
            group.send(OpenSession(session, Sampling()))
            with pytest.raises(WorkerError, match=cause), trio.fail_after(300):
                await group.receive()
            assert group.generation == number and not os.path.exists(f"/proc/{pid}")
            with trio.fail_after(120):
                await group.ready()
        assert await generate([group], 3, prompt_of(17), 2) == expected("llama3", 17, 64)[:2]
