"""The inner optimizer's state beyond a worker group: a peer that is started again goes on with that of its run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from peer.checkpoint.inner_state import DROPPED
from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.data.text_corpus import load_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.events import Event
from peer.model.layout import init_flat
from tests.peer.support.worker_harness import HOUR_S, INNER, MODEL, Log, open_test_worker_group, state_file

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="process supervision is tested through Linux's /proc"),
]


async def test_a_group_begins_with_the_state_of_its_run(tmp_path: Path, text: Path) -> None:
    made, dropped, log = list[torch.Tensor](), list[Event](), Log()
    with log.subscribed(lambda event: dropped.append(event) if event.name == DROPPED else None):
        for run in ("one", "one", "another"):
            async with open_test_worker_group(tmp_path, text, run=run, events=log) as (group, _):
                assert len(dropped) == (run == "another")
                await group.inner_steps([(0, 8)], 0, HOUR_S)
                made.append(group.delta.clone())
                corpus = load_corpus(group.config.data, ByteTokenizer(), str(text))

    torch.set_num_threads(1)
    trainer = InnerTrainer(MODEL, INNER, resolve_device("cpu"))
    for delta in made[:2]:
        start = init_flat(MODEL, seed=0, out=trainer.local).clone()
        for step in range(2):
            trainer.step(corpus.batch([4 * step + k for k in range(4)], 0), step)
        assert torch.equal(delta, start - trainer.local)
    assert torch.equal(made[2], made[0]) and not torch.equal(made[1], made[0])


async def test_a_large_state_is_not_written_after_each_run(tmp_path: Path, text: Path) -> None:
    large = replace(MODEL, hidden_size=256, layers=4, intermediate_size=512)
    async with open_test_worker_group(tmp_path, text, model=large) as (group, _):
        assert 8 * group.layout.numel > 16 << 20
        for _ in range(2):
            assert (await group.inner_steps([(0, 4)], 0, HOUR_S)).steps == 1
        assert not state_file(group).exists()
