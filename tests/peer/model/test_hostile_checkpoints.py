"""Hugging Face folders that somebody else wrote: each ends with one sentence, at once and without memory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from peer.config import ModelConfig
from peer.data.tokenizer import ByteTokenizer
from peer.errors import BarnraiseError, CheckpointError, ConfigError
from peer.model.huggingface import export_pretrained, load_pretrained
from peer.model.layout import init_flat
from peer.model.parameter_files import ParameterFiles
from tests.peer.support.clock import costs_at_most

UNITS_MAX = 20  # of work; all of these take a tenth of one
MEMORY_BYTES = 4 << 20
MODEL = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=32, max_seq_len=16)
INDEX = "model.safetensors.index.json"

_opened: list[str] = []
_watching = [False]


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching[0] and event == "open":
        _opened.append(str(arguments[0]))


sys.addaudithook(_note)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_pretrained(tmp_path / "hub", MODEL, init_flat(MODEL, seed=0), ByteTokenizer())
    return tmp_path / "hub"


def refusal(folder: Path) -> BarnraiseError:
    """Return what loading raises, after checking that it cost nothing."""
    before = psutil.Process().memory_info().rss
    with pytest.raises(BarnraiseError) as caught, costs_at_most(UNITS_MAX):
        load_pretrained(folder)
    assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
    assert "\n" not in str(caught.value)
    return caught.value


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1 << 31},
        {"num_hidden_layers": 1 << 14},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "1"},
        {"num_hidden_layers": 1.5},
        {"hidden_size": 1 << 62},
        {"hidden_size": 1 << 80},
        {"vocab_size": 1 << 31},
        {"vocab_size": 1 << 24, "hidden_size": 1 << 18},
        {"max_position_embeddings": 1 << 62},
        {"max_position_embeddings": None},
        {"head_dim": -16},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": -1.0},
        {"rope_theta": "much", "rope_parameters": None},
        {"rope_parameters": "llama3"},
        {"rope_parameters": [1, 2]},
        {"rope_scaling": 8},
        {"rope_parameters": {"rope_type": "llama3", "factor": None}},
        {"rope_parameters": {"rope_type": ["llama3"]}},
        {"tie_word_embeddings": "yes"},
        {"model_type": ["llama"]},
        {"model_type": "x" * 10_000},
        {"quantization_config": {"bits": 4}},
        {"sliding_window": "wide"},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_a_hostile_config_is_one_sentence(folder: Path, changes: dict[str, object]) -> None:
    edit(folder, **changes)
    refusal(folder)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 200_000, "[]", "null", "{}", "", '{"a": 1', "\x00"])
def test_a_config_that_is_none_is_one_sentence(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    refusal(folder)


def test_a_deep_config_below_the_size_limit_is_one_sentence(folder: Path) -> None:
    deep = '{"model_type": "llama", "other": ' + "[" * 30_000
    (folder / "config.json").write_text(deep)
    refusal(folder)


def test_a_config_above_64_kib_is_not_read(folder: Path) -> None:
    edit(folder, note="x" * (65 << 10))
    assert "larger than" in str(refusal(folder))


@pytest.mark.parametrize("key", ["auto_map", "trust_remote_code", "custom_pipelines"])
def test_a_config_that_names_code_is_refused_by_name(folder: Path, key: str) -> None:
    edit(folder, **{key: {"AutoModel": "evil.Model"}})
    error = refusal(folder)
    assert isinstance(error, ConfigError) and key in str(error)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"model.norm.weight": 7},
        [1, 2],
        "model.safetensors",
        None,
        {"a": "../x.safetensors"},
        {"a": "/etc/passwd"},
        {"a": ".."},
        {"a": ""},
        {"a": "x\0.safetensors"},
        {"a": "pytorch_model.bin"},
    ],
    ids=repr,
)
def test_a_hostile_index_is_one_sentence(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert isinstance(refusal(folder), CheckpointError)


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for index in (None, {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}):
        if index is not None:
            (folder / INDEX).write_text(json.dumps(index))
        _opened.clear()
        _watching[0] = True
        try:
            assert "safetensors" in str(refusal(folder))
        finally:
            _watching[0] = False
        assert any(path.endswith("config.json") for path in _opened)
        assert not any(path.endswith(".bin") for path in _opened)


def _link_weights(folder: Path, secret: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(secret)


def _link_shard(folder: Path, secret: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    (folder / "model-1.safetensors").symlink_to(secret)


def _link_config(folder: Path, secret: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(secret)


@pytest.mark.parametrize("link", [_link_weights, _link_shard, _link_config])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, folder: Path, link: Callable[[Path, Path], None]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((folder / "model.safetensors").read_bytes())
    link(folder, secret)
    assert "link out of its folder" in str(refusal(folder))


def test_the_links_of_hugging_faces_cache_are_followed(tmp_path: Path, folder: Path) -> None:
    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "abc").mkdir(parents=True)
    for number, path in enumerate(folder.iterdir()):
        path.rename(cache / "blobs" / str(number))
        (cache / "snapshots" / "abc" / path.name).symlink_to(Path("../../blobs") / str(number))
    assert load_pretrained(cache / "snapshots" / "abc")[0].hidden_size == MODEL.hidden_size


def test_a_pipe_is_no_file_to_wait_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "not a file" in str(refusal(folder))


def test_more_tensors_than_a_model_has_are_not_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        held = file.read()
        file.seek(0)
        file.write((100 << 20).to_bytes(8, "little"))
        file.truncate(101 << 20)  # sparse: a million names
    assert "one tensor a parameter" in str(refusal(folder))
    (folder / "model.safetensors").write_bytes(held)
    load_pretrained(folder)
    monkeypatch.setattr("peer.model.weight_files.CHECKPOINT_TENSORS_MAX", 3)
    assert "3 are read at most" in str(refusal(folder))
    with pytest.raises(CheckpointError, match="3 are read at most"):
        ParameterFiles([folder])


@pytest.mark.parametrize("kind", ["twice", "integers"])
def test_unfit_weights_are_one_sentence(folder: Path, kind: str) -> None:
    if kind == "integers":
        save_file({"model.embed_tokens.weight": torch.zeros(256, 16, dtype=torch.int64)}, folder / "model.safetensors")
    else:
        for name in ("a.safetensors", "b.safetensors"):
            (folder / name).write_bytes((folder / "model.safetensors").read_bytes())
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (folder / INDEX).write_text(json.dumps(index))
    assert ("I64" if kind == "integers" else "a second time") in str(refusal(folder))
