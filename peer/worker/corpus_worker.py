"""The "corpus" program of a worker: it reads and tokenizes this machine's text, and leaves the ids in files.

The network process needs the ids where it dispatches micro-batches or feeds others. The tokenizer is a stranger's, so
its parser and its patterns run here.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from peer.data.corpus import Corpus
from peer.data.text_corpus import TextCorpus, load_corpus, write_ids
from peer.data.tokenizer import Ids, load_tokenizer
from peer.errors import ConfigError
from peer.ipc.corpus_messages import LoadCorpus
from peer.ipc.messages import CorpusFiles, ModelLoaded, Stop
from peer.worker.config import opened_pages
from peer.worker.control_link import ControlLink


class CorpusWorker:
    """Loads the corpus once; takes no commands."""

    commands: ClassVar[Any] = Stop

    def __init__(self, link: ControlLink, load: LoadCorpus) -> None:
        corpus = _read_text(load)
        link.send(
            ModelLoaded(
                device="",
                bf16=False,
                compiled=False,
                windows=corpus.windows,
                corpus_digest=corpus.digest,
                corpus=corpus.facts,
                corpus_files=CorpusFiles(_file(corpus.train, load.directory), _file(corpus.held_out, load.directory)),
            )
        )

    def run(self) -> None:
        """Wait for the parent to end this process."""
        threading.Event().wait()


def read_corpus(load: LoadCorpus) -> Corpus:
    """Read the text of this machine with the run's tokenizer, or the index of the run's data set. Raises
    ConfigError."""
    return _read_text(load) if load.pages is None else opened_pages(load)


def _read_text(load: LoadCorpus) -> TextCorpus:
    tokenizer = load_tokenizer(load.tokenizer)
    if tokenizer.vocab_size > load.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model only {load.vocab_size}: "
            "raise model.vocab_size or choose another tokenizer"
        )
    return load_corpus(load.data, tokenizer, load.text.folder, Path(load.directory), load.text.field)


def _file(ids: Ids, folder: str) -> str:
    """Return the name of the file that holds the ids; those of bytes are in none yet."""
    if not isinstance(ids, np.memmap):
        name = f"tokens-{hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()}.npy"
        write_ids(Path(folder, name), ids)
        return name
    return Path(str(ids.filename)).name
