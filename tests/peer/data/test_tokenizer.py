"""Tokenizers: bytes, and any tokenizer.json. (test_huggingface.py: the export of the byte tokenizer.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from peer.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from peer.errors import ConfigError


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_file(text.encode()).tolist() == ids
    assert all(0 <= id < tokenizer.vocab_size for id in ids)


def test_invalid_utf8_is_decoded() -> None:
    assert ByteTokenizer().decode([0x41, 0xFF, 0x42]) == "A\N{REPLACEMENT CHARACTER}B"


def test_parts_of_letters_have_their_bytes() -> None:
    """Of a byte-level vocabulary, and of one that falls back to bytes; not of one that has neither."""
    byte_level = Tokenizer(models.BPE(vocab={"Ã": 0, "â": 1, "âĤ": 2, "the": 3}, merges=[]))
    fallback = Tokenizer(
        models.BPE(vocab={"<0xE2>": 0, "<0x82>": 1, "▁the": 2, "<unk>": 3}, merges=[], unk_token="<unk>")
    )
    assert [FileTokenizer(byte_level).bytes_of(id) for id in range(4)] == [b"\xc3", b"\xe2", b"\xe2\x82", b"the"]
    assert [FileTokenizer(fallback).bytes_of(id) for id in range(4)] == [b"\xe2", b"\x82", None, b"<unk>"]
    assert FileTokenizer(fallback).bytes_of(9) is None
    assert ByteTokenizer().bytes_of(0xE2) == b"\xe2" and ByteTokenizer().bytes_of(300) is None


def test_a_tokenizer_json_is_used_as_it_is(tmp_path: Path) -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        ["the cat sat on the mat"] * 9,
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False),
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    text = "the cat\n" * 50_000 + "the mat"  # long enough to be cut into pieces
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(str(spec))
        assert isinstance(tokenizer, FileTokenizer)
        assert tokenizer.vocab_size == trained.get_vocab_size()
        assert tokenizer.encode("the cat") == trained.encode("the cat").ids
    ids = tokenizer.encode_file(text.encode())
    assert tokenizer.vocab_size > ids.max() and len(ids) < len(text) / 2
    copy = tmp_path / "copy"
    copy.mkdir()
    tokenizer.save(copy)
    assert load_tokenizer(str(copy)).encode("the mat") == trained.encode("the mat").ids
    assert load_tokenizer(str(copy)).fingerprint == tokenizer.fingerprint


def test_bad_specs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(str(tmp_path / "no.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_tokenizer(str(tmp_path))
