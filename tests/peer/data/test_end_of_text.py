"""Between two texts stands the run's token for it, one id, whatever cuts and joins there were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HubTokenizer

from peer.config import DataConfig
from peer.data.text_corpus import TextCorpus, load_corpus
from peer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

TOKEN = "<|endoftext|>"
TEXTS = [f"text {number}\n" + f"word {number} of it " * (7 * number % 23) for number in range(400)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and one special token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save(folder)
    hub = HubTokenizer.from_file(str(folder / "tokenizer.json"))
    hub.add_special_tokens([AddedToken(TOKEN, special=True)])
    hub.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


def read(folder: Path, tokenizer: Tokenizer, end_of_text: str | None) -> TextCorpus:
    config = DataConfig(seq_len=16, source="folder", validation_share=0.3, end_of_text=end_of_text)
    return load_corpus(config, tokenizer, str(folder))


def texts_of(corpus: TextCorpus, tokenizer: Tokenizer) -> list[str]:
    """What lies between the tokens."""
    (end,) = tokenizer.encode(TOKEN)
    found = []
    for part in (corpus.train, corpus.held_out):
        ids = np.asarray(part)
        found += [
            tokenizer.decode(list(map(int, one[one != end]))) for one in np.split(ids, np.flatnonzero(ids == end))
        ]
    return found


@pytest.mark.parametrize("kind", ["files", "jsonl"])
def test_each_text_ends_with_the_token(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    if kind == "files":
        for number, text in enumerate(TEXTS):
            (tmp_path / f"{number:04}.txt").write_text(text)
    else:
        (tmp_path / "all.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    found = texts_of(read(tmp_path, tokenizer, TOKEN), tokenizer)
    cut = [text for text in found if text not in TEXTS]
    assert len(cut) <= 4, "a block that is held out may cut a text, at both of its ends"
    assert "".join(sorted("".join(found))) == "".join(sorted("".join(TEXTS)))
    assert len(found) - len(cut) >= len(TEXTS) - 4


@pytest.mark.parametrize("end_of_text", [None, ""])
def test_without_one_an_empty_line_stands_there(tmp_path: Path, tokenizer: Tokenizer, end_of_text: str | None) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:04}.txt").write_text(text)
    corpus = read(tmp_path, tokenizer, end_of_text)
    (end,) = tokenizer.encode(TOKEN)
    joined = tokenizer.decode(list(map(int, corpus.train)))
    assert end not in corpus.train and joined.count("\n\n") > 100
