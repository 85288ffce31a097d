"""Reading a corpus without running its tokenizer in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import trio

from peer.cores import usable_cores
from peer.corpus_facts import CorpusFacts
from peer.data.corpus import Corpus, load_corpus, map_ids
from peer.data.tokenizer import BYTES, ByteTokenizer, Ids
from peer.errors import ConfigError, WorkerError
from peer.ipc.corpus_messages import LoadCorpus
from peer.ipc.messages import CorpusFiles, ModelLoaded
from peer.worker.config import WorkerConfig
from peer.worker.process import WorkerProcess, handshake, make_private

LOG: Final = "corpus-worker.log"


async def read_corpus_apart(config: WorkerConfig) -> Corpus:
    """Return this machine's corpus. A tokenizer of the run's runs in a worker process of its own, which is ended when
    the ids are on disk. Raises ConfigError if there is too little text or the tokenizer is refused, WorkerError."""
    if config.tokenizer == BYTES:
        return await trio.to_thread.run_sync(load_corpus, config.data, ByteTokenizer(), config.data_folder)
    make_private(config.corpus_folder)
    log, threads = config.directory / LOG, config.threads or usable_cores()
    worker = WorkerProcess.start(log, config.corpus_folder, threads, ())
    try:
        answer = await handshake(worker, _load_message(config), config.load_timeout_s)
    finally:
        await worker.destroy()
    if not isinstance(answer, ModelLoaded):
        raise ConfigError(answer.message)
    assert answer.corpus_files is not None and answer.corpus is not None
    return await trio.to_thread.run_sync(_mapped, config, answer.corpus_digest, answer.corpus, answer.corpus_files)


def _load_message(config: WorkerConfig) -> LoadCorpus:
    return LoadCorpus(
        data=config.data,
        tokenizer=config.tokenizer,
        vocab_size=config.model.vocab_size,
        data_folder=config.data_folder,
        directory=str(config.corpus_folder),
    )


def _mapped(config: WorkerConfig, digest: bytes, facts: CorpusFacts, files: CorpusFiles) -> Corpus:
    return Corpus(
        train=_ids(config, files.train),
        held_out=_ids(config, files.held_out),
        digest=digest,
        seq_len=config.data.seq_len,
        facts=facts,
    )


def _ids(config: WorkerConfig, name: str) -> Ids:
    """Map a file of ids, which must be of the model's vocabulary."""
    path = config.corpus_folder / Path(name).name
    try:
        return map_ids(path, config.model.vocab_size)
    except (OSError, ValueError) as error:
        raise WorkerError(f"the token ids in {path} cannot be used ({error}): delete it and join again") from error
