"""A run's tokenizer runs in a worker process: the network process gets the ids, or an error, and lives."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import msgspec
import pytest

from peer.data.text_corpus import TextCorpus, load_corpus
from peer.data.tokenizer import ByteTokenizer, load_tokenizer
from peer.errors import ConfigError, WorkerError
from peer.ipc.corpus_messages import OwnText
from peer.worker.corpus_client import read_corpus_apart
from tests.peer.support.worker_harness import MODEL, worker_config
from tests.support.forking.forked import children

pytestmark = pytest.mark.process


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    ByteTokenizer().save(tmp_path)
    return tmp_path / "tokenizer.json"


async def test_the_ids_are_those_of_the_tokenizer(tmp_path: Path, text: Path, hub: Path) -> None:
    config = worker_config(tmp_path, text, tokenizer=str(hub))
    corpus = await read_corpus_apart(config)
    assert isinstance(corpus, TextCorpus)
    here = load_corpus(config.data, load_tokenizer(str(hub)), str(text))
    assert corpus.digest == here.digest and corpus.facts == here.facts
    assert corpus.train.tolist() == here.train.tolist() and corpus.held_out.tolist() == here.held_out.tolist()
    assert corpus.batch([1, 2], seed=0).tolist() == here.batch([1, 2], seed=0).tolist()
    assert not children(), "the worker is gone"
    for ids in (corpus.train, corpus.held_out):  # where no other worker may write
        assert Path(str(getattr(ids, "filename", ""))).parent == tmp_path / "corpus"


async def test_bytes_need_no_worker(tmp_path: Path, text: Path) -> None:
    config = worker_config(tmp_path, text)
    assert (await read_corpus_apart(config)).digest == load_corpus(config.data, ByteTokenizer(), str(text)).digest
    assert not (tmp_path / "corpus-worker.log").exists()


@pytest.mark.usefixtures("forked")
async def test_what_is_packed_is_unpacked_in_a_worker(tmp_path: Path, text: Path) -> None:
    packed = tmp_path / "packed" / "a.txt.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(b"".join(path.read_bytes() for path in sorted(text.glob("*.txt")))))
    for data in (packed.parent, packed):
        config = worker_config(tmp_path, data)
        corpus = await read_corpus_apart(config)
        assert isinstance(corpus, TextCorpus)
        here = load_corpus(config.data, ByteTokenizer(), str(data))
        assert (corpus.digest, corpus.facts) == (here.digest, here.facts)
        assert corpus.train.tolist() == here.train.tolist() and corpus.held_out.tolist() == here.held_out.tolist()
    assert (tmp_path / "corpus-worker.log").exists() and not children()


@pytest.mark.usefixtures("forked")
async def test_the_field_that_the_user_names_is_read_wherever_it_is_read(tmp_path: Path, hub: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"text": "no", "body": f"line {number} " * 9}) + "\n" for number in range(99)))
    for tokenizer in ("bytes", str(hub)):
        config = worker_config(tmp_path, data, tokenizer=tokenizer, text=OwnText(str(data), "body"))
        corpus = await read_corpus_apart(config)
        assert isinstance(corpus, TextCorpus)
        here = load_corpus(config.data, ByteTokenizer(), str(data), text_field="body")
        assert corpus.digest == here.digest and corpus.facts.documents == 99


@pytest.mark.usefixtures("forked")
async def test_a_hostile_tokenizer_is_one_sentence(tmp_path: Path, text: Path, hub: Path) -> None:
    content = json.loads(hub.read_text())
    evil = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    hub.write_text(json.dumps({**content, "pre_tokenizer": evil}))
    with pytest.raises(ConfigError, match="unknown regular expression"):
        await read_corpus_apart(worker_config(tmp_path, text, tokenizer=str(hub)))
    hub.write_bytes(b" " * (33 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        await read_corpus_apart(worker_config(tmp_path, text, tokenizer=str(hub)))
    assert not children()


@pytest.mark.usefixtures("forked")
async def test_a_tokenizer_of_more_ids_than_the_model_is_refused(tmp_path: Path, text: Path, hub: Path) -> None:
    small = msgspec.structs.replace(MODEL, vocab_size=255)
    with pytest.raises(ConfigError, match="the tokenizer has 256 ids and the model only 255"):
        await read_corpus_apart(worker_config(tmp_path, text, tokenizer=str(hub), model=small))


async def test_a_worker_that_dies_is_an_error(
    tmp_path: Path, text: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="died while loading"):
        await read_corpus_apart(worker_config(tmp_path, text, tokenizer=str(hub)))


@pytest.mark.usefixtures("forked")
async def test_without_the_users_folder_nothing_is_read(tmp_path: Path, hub: Path) -> None:
    config = worker_config(tmp_path, tmp_path, tokenizer=str(hub), text=OwnText())
    with pytest.raises(ConfigError, match="--data"):
        await read_corpus_apart(config)
