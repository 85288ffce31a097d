"""Reading a corpus without running its tokenizer in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import trio

from peer.corpus_facts import CorpusFacts
from peer.data.corpus import Corpus
from peer.data.text_corpus import TextCorpus, has_packed_text, load_corpus, map_ids
from peer.data.tokenizer import BYTES, ByteTokenizer, Ids
from peer.errors import ConfigError, WorkerError
from peer.ipc.corpus_messages import LoadCorpus
from peer.ipc.messages import CorpusFiles, ModelLoaded
from peer.machine import usable_cores
from peer.worker.config import WorkerConfig, opened_pages
from peer.worker.process import WorkerProcess, handshake, make_private

LOG: Final = "corpus-worker.log"
LIMIT_S: Final = 600.0


async def read_corpus_apart(config: WorkerConfig) -> Corpus:
    """Return the corpus of a peer. Raises as `read_text_apart`."""
    load = config.load_corpus(config.corpus_folder)
    if load.pages is not None:  # ids need no tokenizer
        return await trio.to_thread.run_sync(opened_pages, load)
    return await read_text_apart(load, config.directory / LOG, config.compute.threads_each, config.load_timeout_s)


async def read_text_apart(
    load: LoadCorpus, log: Path, threads: int | None = None, limit_s: float = LIMIT_S
) -> TextCorpus:
    """Return this machine's corpus. A tokenizer of the run's, and what unpacks text, run in a worker process of their
    own, which is ended when the ids are on disk. Raises ConfigError if there is too little text or the tokenizer is
    refused, WorkerError."""
    if load.tokenizer == BYTES and not await trio.to_thread.run_sync(has_packed_text, load.text.folder):
        text = load.text
        return await trio.to_thread.run_sync(load_corpus, load.data, ByteTokenizer(), text.folder, None, text.field)
    make_private(Path(load.directory))
    worker = WorkerProcess.start(log, Path(load.directory), threads or usable_cores(), ())
    try:
        answer = await handshake(worker, load, limit_s)
    finally:
        await worker.destroy()
    if not isinstance(answer, ModelLoaded):
        raise ConfigError(answer.message)
    assert answer.corpus_files is not None and answer.corpus is not None
    return await trio.to_thread.run_sync(_mapped, load, answer.corpus_digest, answer.corpus, answer.corpus_files)


def _mapped(load: LoadCorpus, digest: bytes, facts: CorpusFacts, files: CorpusFiles) -> TextCorpus:
    return TextCorpus(
        train=_ids(load, files.train),
        held_out=_ids(load, files.held_out),
        digest=digest,
        seq_len=load.data.seq_len,
        facts=facts,
    )


def _ids(load: LoadCorpus, name: str) -> Ids:
    """Map a file of ids, which must be of the model's vocabulary."""
    path = Path(load.directory) / Path(name).name
    try:
        return map_ids(path, load.vocab_size)
    except (OSError, ValueError) as error:
        raise WorkerError(f"the token ids in {path} cannot be used ({error}): delete it and join again") from error
