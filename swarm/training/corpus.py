"""The run's text as the network process reads it: for stage 0, which dispatches micro-batches, and for feeders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio
from torch import Tensor

from peer.data import text_corpus
from peer.data.corpus import Corpus, sample_numbers
from peer.worker.corpus_client import read_corpus_apart
from swarm.protocol.ledger import Range
from swarm.run.peer_context import PeerContext
from swarm.training.worker_config import worker_config

VALIDATION_SEQUENCES = 64


@dataclass(frozen=True)
class CorpusReader:
    """A reader of this machine's corpus. Reading blocks for a moment: call it in a thread."""

    corpus: Corpus
    seed: int

    def read(self, spans: Sequence[Range]) -> Tensor:
        """Return the samples of these ranges, (n, seq_len + 1) int64."""
        return self.corpus.batch(list(sample_numbers(spans)), self.seed)

    def held_out(self, batch_size: int) -> list[Tensor]:
        """Return held-out samples in batches of `batch_size`, the same on every call, each (B, seq_len + 1) int64."""
        return list(self.corpus.held_out_batches(batch_size, max(1, VALIDATION_SEQUENCES // batch_size)))


async def open_corpus(context: PeerContext) -> CorpusReader:
    """Read and tokenize the run's text; event `corpus_read` reports its sizes. Raises ConfigError where this machine
    has too little of it, WorkerError."""
    config = worker_config(context)
    corpus = await read_corpus_apart(config)
    context.host.events.emit(corpus.facts.event())
    return CorpusReader(corpus, config.seed)


async def has_text(context: PeerContext) -> bool:
    """Whether this machine has any of the run's text."""
    return await trio.to_thread.run_sync(text_corpus.has_text, context.manifest.data, context.config.text.folder)
