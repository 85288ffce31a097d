"""Our own kind of checkpoint, signed by somebody: a manifest that lies is refused before memory is taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from peer.checkpoint.checkpoint_file import CheckpointManifest, describe, load_checkpoint, write_checkpoint
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import chunk_size_for, hash_list_bytes
from peer.errors import CheckpointError
from peer.identity import Identity, sign_body
from tests.peer.checkpoint.test_store import LAYOUT, some_state
from tests.peer.support.clock import costs_at_most

UNITS_MAX = 50  # of work; all of these take a tenth of one
MEMORY_BYTES = 16 << 20
SIGNER = Identity.generate()
FIRST = next(iter(LAYOUT.slots))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A sound checkpoint, and its manifest as plain values."""
    state = StateGeneration(some_state(1))
    manifest = describe("run", 1, b"head", state, LAYOUT)
    write_checkpoint(tmp_path / "c", SIGNER, manifest, state)
    return tmp_path / "c", msgspec.msgpack.decode(msgspec.msgpack.encode(manifest))


def put(path: Path, body: object) -> None:
    (path / "manifest.msgpack").write_bytes(msgspec.msgpack.encode(sign_body(SIGNER, "checkpoint", body)))  # type: ignore[arg-type]


def refused(path: Path) -> str:
    before = psutil.Process().memory_info().rss
    with pytest.raises(CheckpointError) as caught, costs_at_most(UNITS_MAX):
        load_checkpoint(path)
    assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
    return str(caught.value)


def resized(content: dict[str, Any], numel: int) -> dict[str, Any]:
    """The manifest of one parameter of that many values, consistent in itself."""
    size = 4 * numel
    hashes = [bytes(32)] * min(hash_list_bytes(size) // 32, 1000)
    return {
        **content,
        "layout": {FIRST: [0, [numel], numel]},
        "numel": numel,
        "vectors": ["theta"],
        "shards": [{"file": content["shards"][0]["file"], "vector": "theta", "names": [FIRST]}],
        "tree": {"chunk_size": chunk_size_for(size), "size_bytes": min(size, (1 << 63) - 1), "hashes": hashes},
    }


@pytest.mark.parametrize("numel", [1 << 40, 1 << 41, 1 << 62, (1 << 63) - 1, 0, -1, 1 << 28])
def test_parameters_that_no_file_holds_are_not_allocated(saved: tuple[Path, dict[str, Any]], numel: int) -> None:
    path, content = saved
    put(path, resized(content, numel))
    refused(path)


@pytest.mark.parametrize("shape", [(-2, -2), (2, -2), (0, 4), (1 << 40,), (4, 1 << 62), (), (2,) * 10_000])
def test_shapes_are_those_of_tensors(saved: tuple[Path, dict[str, Any]], shape: tuple[int, ...]) -> None:
    path, content = saved
    offset, _, numel = content["layout"][FIRST]
    content["layout"][FIRST] = [offset, shape, 4 if shape == (-2, -2) else numel]
    put(path, content)
    refused(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"round": -1},
        {"round": 1 << 62},
        {"round": float("nan")},
        {"vectors": ["theta"] * 9},
        {"vectors": ["theta", "theta"]},
        {"vectors": []},
        {"shards": []},
        {"tree": {"chunk_size": 0, "size_bytes": 0, "hashes": []}},
        {"layout": {}},
        {"layout": []},
    ],
    ids=repr,
)
def test_other_lies_are_one_sentence(saved: tuple[Path, dict[str, Any]], changes: dict[str, object]) -> None:
    path, content = saved
    put(path, {**content, **changes})
    refused(path)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "", ".", "..", "a\0.safetensors", "x.bin"])
def test_files_are_those_of_the_folder(saved: tuple[Path, dict[str, Any]], file: str) -> None:
    path, content = saved
    content["shards"][0]["file"] = file
    put(path, content)
    assert "outside its folder" in refused(path)


def test_a_link_is_not_followed(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, content = saved
    file = path / content["shards"][0]["file"]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(path)


@pytest.mark.parametrize("content", [b"\x91" * 200_000, b"\xdd\xff\xff\xff\xff", b"", b"\xc0"])
def test_a_manifest_that_is_none_is_one_sentence(saved: tuple[Path, dict[str, Any]], content: bytes) -> None:
    path, _ = saved
    (path / "manifest.msgpack").write_bytes(content)
    refused(path)
    (path / "manifest.msgpack").write_bytes(
        msgspec.msgpack.encode({"body": content, "signer": SIGNER.peer_id, "signature": bytes(64)})
    )
    refused(path)


def test_the_sound_one_loads(saved: tuple[Path, dict[str, Any]]) -> None:
    path, content = saved
    put(path, msgspec.convert(content, CheckpointManifest))
    assert load_checkpoint(path, "run", SIGNER.peer_id).round == 1
    with pytest.raises(CheckpointError, match="is signed by"):
        load_checkpoint(path, "run", Identity.generate().peer_id)
