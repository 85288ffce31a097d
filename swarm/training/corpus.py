"""The run's text as the network process reads it: for stage 0, which issues micro-batches, and for feeders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio
from torch import Tensor

from peer.data import corpus as data
from peer.data.corpus import Corpus, load_corpus, sample_numbers
from peer.data.tokenizer import load_tokenizer
from swarm.protocol.ledger import Range
from swarm.training.context import PeerContext

VALIDATION_SEQUENCES = 64


@dataclass(frozen=True)
class CorpusReader:
    """This machine's corpus. Reading blocks for a moment: call it in a thread."""

    corpus: Corpus
    seed: int

    def read(self, spans: Sequence[Range]) -> Tensor:
        """The samples of these ranges, (n, seq_len + 1) int64."""
        return self.corpus.batch(list(sample_numbers(spans)), self.seed)

    def held_out(self, batch_size: int) -> list[Tensor]:
        """Held-out samples in batches of `batch_size`, the same on every call, each (B, seq_len + 1) int64."""
        return list(self.corpus.held_out_batches(batch_size, max(1, VALIDATION_SEQUENCES // batch_size)))


async def open_corpus(context: PeerContext) -> CorpusReader:
    """Read and tokenize the run's text. ConfigError where this machine has too little of it."""

    def load() -> CorpusReader:
        worker_group = context.worker_group()
        corpus = load_corpus(worker_group.data, load_tokenizer(worker_group.tokenizer), worker_group.directory)
        return CorpusReader(corpus, worker_group.seed)

    return await trio.to_thread.run_sync(load)


async def has_text(context: PeerContext) -> bool:
    """Whether there is any of it on this machine."""
    return await trio.to_thread.run_sync(data.has_text, context.worker_group().data)
