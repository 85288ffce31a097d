"""What is known of each worker program before it is imported, and that no other is imported with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from peer.config import DataConfig
from peer.confinement.grants import Grants
from peer.footprint.layout import Compute, Layout
from peer.footprint.step_size import StepSize
from peer.ipc.block_messages import Fds, LoadBlocks, RingEnds
from peer.ipc.build_messages import LoadBuild
from peer.ipc.corpus_messages import LoadCorpus, OwnText
from peer.ipc.first_message import FirstMessage
from peer.ipc.grammar_messages import GrammarBounds, LoadGrammar
from peer.ipc.messages import VectorFds, frame
from peer.ipc.span import Span
from peer.ipc.stage_messages import LoadStage
from peer.ipc.stage_spec import StageSpec
from peer.ipc.text_messages import LoadText
from peer.ipc.train_messages import LoadTrain
from peer.worker.programs import PROGRAMS
from tests.peer.support.worker_harness import INNER, MODEL

ROOT = Path(__file__).parents[3]
DATA = DataConfig(source="folder", seq_len=8)
FDS: Fds = (3, 4, 5)
LOADS: dict[str, FirstMessage] = {
    "train": LoadTrain(
        rank=1,
        layout=Layout(replicate=2),
        meeting="meeting-1",
        run="run",
        model=MODEL,
        inner=INNER,
        corpus=LoadCorpus(data=DATA, tokenizer="bytes", vocab_size=9, text=OwnText("/text"), directory="/own"),
        compute=Compute("cpu", memory_bytes=1e9),
        step_size=StepSize(1),
        seed=7,
        vectors=VectorFds(3, 4),
    ),
    "stage": LoadStage(
        rank=0,
        layout=Layout(),
        meeting="meeting-0",
        run="run",
        model=MODEL,
        inner=INNER,
        stage=StageSpec(span=Span.whole(MODEL.layers), index=0, max_tokens=8),
        compute=Compute(compile=True),
        directory="/own",
        vectors=VectorFds(3, 4),
        slots_fd=6,
    ),
    "corpus": LoadCorpus(data=DATA, tokenizer="/tokens", vocab_size=9, text=OwnText(), directory="/own"),
    "block": LoadBlocks(
        model=MODEL,
        span=Span.whole(MODEL.layers),
        dtype="fp32",
        window=None,
        folders=("/weights",),
        directory="/own",
        device="cuda:0",
        pages=1,
        rows_max=1,
        chunk_tokens=1,
        to_worker=RingEnds(FDS, 1),
        from_worker=RingEnds(FDS, 1),
    ),
    "text": LoadText(tokenizer="/tokens", directory="/own", memory_bytes=9),
    "grammar": LoadGrammar(
        tokenizer="/tokens", vocab_size=9, directory="/own", sockets=9, bounds=(GrammarBounds(1.0, 0.1, 9),)
    ),
    "build": LoadBuild(plan="/plan", tokenizer="/tokens", readable=("/text", "/more"), directory="/own"),
}
GRANTS = {
    "train": Grants("/own", ("/text", "bytes"), tcp=True),
    "stage": Grants("/own", compiles=True, accelerators=True),
    "corpus": Grants("/own", ("/tokens",)),
    "text": Grants("/own", ("/tokens",)),
    "grammar": Grants("/own", ("/tokens",)),
    "block": Grants("/own", ("/weights",), accelerators=True),
    "build": Grants("/own", ("/plan", "/tokens", "/text", "/more")),
}


def test_each_first_message_is_of_one_program() -> None:
    assert set(get_args(FirstMessage)) == set(PROGRAMS) == {type(load) for load in LOADS.values()}


@pytest.mark.parametrize("name", LOADS)
def test_a_first_message_names_its_program_and_its_grants(name: str) -> None:
    load = LOADS[name]
    decoded: Any = msgspec.msgpack.decode(frame(load)[4:], type=FirstMessage)
    assert decoded == load
    assert PROGRAMS[type(decoded)].grants(decoded) == GRANTS[name]


IMPORTS = """
import os, sys
from peer.worker import main, programs

assert "torch" not in sys.modules  # it starts threads, and the process is not confined yet
import torch  # once for all
for name in sys.argv[1:]:
    [find] = [entry.find for kind, entry in programs.PROGRAMS.items() if kind.__name__ == name]
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    find()
    print(*sorted(name for name in sys.modules if name.startswith("peer.worker.") and name.endswith("_worker")))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.process
def test_only_the_program_that_runs_is_imported() -> None:
    expected = {
        "train": "peer.worker.corpus_worker peer.worker.train_worker",  # it reads its corpus itself
        "stage": "peer.worker.stage_worker",
        "corpus": "peer.worker.corpus_worker",
        "block": "peer.worker.block_worker",
        "text": "peer.worker.text_worker",
    }
    kinds = [type(LOADS[name]).__name__ for name in expected]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *kinds], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stderr == "" and dict(zip(expected, done.stdout.splitlines(), strict=True)) == expected
