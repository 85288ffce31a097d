"""The check of `peer doctor --data`: what a folder or file of text holds, for a run or for any."""

from __future__ import annotations

from typing import Final

from cli.checks.machine import Finding, failure
from peer.config import DataConfig
from peer.data.text_corpus import within_memory
from peer.data.tokenizer import ByteTokenizer
from peer.errors import BarnraiseError
from peer.files import temporary_folder
from peer.ipc.corpus_messages import LoadCorpus, OwnText
from peer.machine import memory_bytes
from peer.worker.corpus_client import read_text_apart
from swarm.run.manifest import Manifest
from swarm.run.manifest_transfer import TOKENIZER_FILE
from swarm.run.sections import BYTES_TOKENIZER

ANY_RUN: Final = DataConfig(seq_len=1, source="folder")


async def text_finding(text: OwnText, manifest: Manifest | None = None, tokenizer: bytes = b"") -> Finding:
    """Read the text, at an absolute path, as a worker of that run would; without one, as bytes, for any sequences.
    `tokenizer`: the run's tokenizer.json, empty for bytes."""
    data = ANY_RUN if manifest is None else manifest.data
    try:
        with temporary_folder("barnraise-text-") as folder:
            if tokenizer:
                (folder / TOKENIZER_FILE).write_bytes(tokenizer)
            load = LoadCorpus(
                data=within_memory(data, memory_bytes()),
                tokenizer=str(folder / TOKENIZER_FILE) if tokenizer else BYTES_TOKENIZER,
                vocab_size=ByteTokenizer.vocab_size if manifest is None else manifest.model.vocab_size,
                text=text,
                directory=str(folder / "worker"),
            )
            facts = (await read_text_apart(load, folder / "worker.log")).facts
    except BarnraiseError as error:
        return failure("text", error)
    tokens = "" if manifest is None else f"; {facts.train_tokens + facts.held_out_tokens} tokens of the run's tokenizer"
    return Finding("text", "ok", f"{facts.account}{tokens}")
