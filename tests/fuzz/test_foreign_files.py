"""Mutated files that others wrote: Hugging Face folders, tokenizers, and the cache of token ids."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from peer.config import ModelConfig
from peer.data.text_corpus import _tokenize
from peer.data.tokenizer import ByteTokenizer, load_tokenizer
from peer.errors import BarnraiseError
from peer.model.huggingface import export_pretrained, flatten, load_pretrained
from peer.model.layout import FlatLayout
from tests.fuzz.support.guard import MUTATIONS, Trial, chance_for, no_growth
from tests.fuzz.support.mutations import of_bytes, of_json

MODEL = ModelConfig(hidden_size=8, layers=2, heads=2, kv_heads=1, intermediate_size=8, max_seq_len=16, vocab_size=256)
TEXT = "the cat sat on the mat\n" * 20


def header_of(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mutate the JSON header of a safetensors file, or any of its bytes."""
    if chance.random() < 0.3:
        return of_bytes(chance, data, other)
    size = int.from_bytes(data[:8], "little")
    header = of_json(chance, data[8 : 8 + size], data[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


@pytest.mark.parametrize("count", MUTATIONS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_checkpoint_of_hugging_face(name: str, count: int, tmp_path: Path) -> None:
    export_pretrained(tmp_path, MODEL, torch.zeros(FlatLayout.of(MODEL).numel), ByteTokenizer())
    if name.endswith("index.json"):
        os.rename(tmp_path / "model.safetensors", tmp_path / "part.safetensors")
        names = list(load_names(tmp_path / "part.safetensors"))
        index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
        (tmp_path / name).write_text(json.dumps(index))
    load_pretrained(tmp_path)
    valid, chance, trial = (tmp_path / name).read_bytes(), chance_for(name), Trial(name, (BarnraiseError,))
    change = header_of if name == "model.safetensors" else of_json

    def work(data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        config, tensors = load_pretrained(tmp_path)
        flatten(config, tensors)

    with no_growth():
        for number in range(count):
            trial.run(number, change(chance, valid, valid), work)
    assert trial.refused


def load_names(path: Path) -> list[str]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return [name for name in json.loads(data[8 : 8 + size]) if name != "__metadata__"]


def a_tokenizer(path: Path) -> None:
    """Write a small byte-level BPE."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    trained.train_from_iterator([TEXT], trainer)
    trained.save(str(path))


@pytest.mark.parametrize("count", MUTATIONS)
def test_a_tokenizer(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUST_BACKTRACE", raising=False)  # with it the first panic loads 50 MB of symbols, once
    path = tmp_path / "tokenizer.json"
    a_tokenizer(path)
    valid, chance, trial = path.read_bytes(), chance_for("tokenizer"), Trial("tokenizer.json", (BarnraiseError,))

    def work(data: bytes) -> None:
        path.write_bytes(data)
        tokenizer = load_tokenizer(str(path))
        ids = tokenizer.encode("the cat sat")
        assert all(0 <= id < tokenizer.vocab_size for id in ids)
        tokenizer.decode(ids)

    with no_growth():
        for number in range(count):
            trial.run(number, of_json(chance, valid, valid), work)
    assert trial.refused


@pytest.mark.parametrize("count", MUTATIONS)
def test_cached_token_ids(count: int, tmp_path: Path) -> None:
    """The cache is this machine's own: whatever a crash or a full disk left there is made again."""
    a_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    honest = np.asarray(_tokenize(TEXT.encode(), tokenizer, tmp_path))
    (path,) = tmp_path.glob("tokens-*.npy")
    valid, chance, trial = path.read_bytes(), chance_for("tokens"), Trial(path.name, (BarnraiseError,))
    head = valid.index(b"\n") + 1

    def work(data: bytes) -> None:
        path.unlink()  # not written over: an earlier mutation may still be mapped
        path.write_bytes(data)
        ids = np.asarray(_tokenize(TEXT.encode(), tokenizer, tmp_path))
        assert ids.dtype == honest.dtype and ids.shape == honest.shape
        assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size

    with no_growth():
        for number in range(count):
            at = head if chance.random() < 0.7 else len(valid)
            trial.run(number, of_bytes(chance, valid[:at], valid) + valid[at:], work)
