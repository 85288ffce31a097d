"""The run's text as the network process reads it: for stage 0, which dispatches micro-batches, and for feeders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio
from torch import Tensor

from peer.data import text_corpus
from peer.data.corpus import Corpus, sample_numbers
from peer.data.first_samples import FirstSamples
from peer.worker.corpus_client import read_corpus_apart
from swarm.protocol.ledger import Range
from swarm.protocol.samples import OwnSamples, SampleSupply
from swarm.run.peer_context import PeerContext
from swarm.training.worker_config import worker_config

VALIDATION_SEQUENCES: Final = 64
AHEAD_SAMPLES: Final = 1024
ReadBatch = Callable[[list[int], int], Tensor]


@dataclass(frozen=True)
class CorpusReader:
    """A reader of the run's samples on this machine."""

    corpus: Corpus
    batch: ReadBatch
    """Of that corpus: with sample numbers and the seed of their order."""
    seed: int
    samples: SampleSupply = field(default_factory=OwnSamples)

    async def read(self, spans: Sequence[Range]) -> Tensor:
        """Wait for the samples of these ranges, and return them, (n, seq_len + 1) int64."""
        async with self.samples.holding(spans):
            read = partial(self.batch, list(sample_numbers(spans)), self.seed)
            return await trio.to_thread.run_sync(read)

    async def read_ahead(self, spans: Sequence[Range]) -> Tensor:
        """As `read`, for a caller that will likely ask for the samples that follow."""
        self.samples.expect([(first, last + AHEAD_SAMPLES) for first, last in spans])
        return await self.read(spans)

    def held_out(self, batch_size: int) -> list[Tensor]:
        """Return held-out samples in batches of `batch_size`, the same on every call, each (B, seq_len + 1) int64. It
        blocks for a moment: call it in a thread."""
        return list(self.corpus.held_out_batches(batch_size, max(1, VALIDATION_SEQUENCES // batch_size)))


async def open_corpus(context: PeerContext) -> CorpusReader:
    """Read and tokenize the run's text, or open its data set; event `corpus_read` reports its sizes. Raises ConfigError
    where this machine has too little text, WorkerError."""
    config = worker_config(context)
    corpus = await read_corpus_apart(config)
    context.host.events.emit(corpus.facts.event())
    first = FirstSamples(corpus, context.host.events.emit)
    batch = corpus.batch if config.pages is None else first.batch
    return CorpusReader(corpus, batch, config.seed, context.samples)


async def has_text(context: PeerContext) -> bool:
    """Whether this machine has any of the run's text, or can get it."""
    if context.samples.folders is not None:
        return True
    return await trio.to_thread.run_sync(text_corpus.has_text, context.manifest.data, context.config.text.folder)
