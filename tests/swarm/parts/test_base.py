"""The base of a run that tunes an adapter: hashed once, and found again on a machine by its hashes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.config import AdapterConfig, ModelConfig
from peer.data.tokenizer import ByteTokenizer
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.identity import Identity
from peer.model.huggingface import export_pretrained
from peer.model.layout import FlatLayout, init_flat
from peer.model.parameter_files import ParameterFiles
from swarm.coordinator.base_model import hash_base
from swarm.parts import base as parts_base
from swarm.parts.base import local_base
from swarm.parts.held_parts import HeldParts
from swarm.parts.part_files import part_tensors, write_part
from swarm.parts.weights import BaseWeights, part_spans
from swarm.run.config import Pretrained
from swarm.run.features import ADAPTER, QUANTIZED
from swarm.run.home import Home
from swarm.run.manifest import Manifest
from tests.swarm.run.test_manifest import make_manifest

MODEL = ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128, max_seq_len=64)
ALL = range(2)


def write(folder: Path, seed: int = 1, model: ModelConfig = MODEL) -> Path:
    export_pretrained(folder, model, init_flat(model, seed), ByteTokenizer())
    return folder


async def manifest_of(folder: Path, home: Path, wanted: Pretrained) -> Manifest:
    """Return the manifest of a run that tunes the checkpoint in `folder`."""
    home.mkdir()
    base = await trio.to_thread.run_sync(hash_base, folder, wanted, Home(home), EventLog())
    return make_manifest(
        Identity.generate().peer_id,
        model=msgspec.structs.replace(base.model, adapter=AdapterConfig(rank=4)),
        cuts=((0, 2),),
        base=base.frozen,
        requires=(ADAPTER, QUANTIZED),
    )


@pytest.mark.parametrize("quantize", [None, "int8", "nf4"])
async def test_a_copy_of_the_checkpoint_is_the_base_and_another_one_is_not(tmp_path: Path, quantize: str) -> None:
    folder = write(tmp_path / "base")
    wanted = msgspec.convert({"init": str(folder), "quantize": quantize}, Pretrained)
    manifest = await manifest_of(folder, tmp_path / "coordinator", wanted)
    assert os.fsdecode(Home(tmp_path / "coordinator").base_source.read_bytes()) == str(folder)
    copy = write(tmp_path / "copy")
    held = await local_base(manifest, tmp_path / "kept", copy, EventLog())
    assert not held.missing(ALL)
    assert (copy in held.folders) == (quantize is None), "quantized parts are made of it"
    again = await local_base(manifest, tmp_path / "kept", None, EventLog())
    assert again.missing(ALL) == ([0, 1] if quantize is None else []), "what was made of it stays"
    for other in (write(tmp_path / "other", seed=2), tmp_path / "coordinator"):
        with pytest.raises(ConfigError, match=r"--base .* is not the base of this run.*: name the folder of the"):
            await local_base(manifest, tmp_path / other.name / "parts", other, EventLog())


async def test_a_damaged_part_is_no_part(tmp_path: Path) -> None:
    folder = write(tmp_path / "base")
    manifest = await manifest_of(folder, tmp_path / "home", Pretrained(init=str(folder), quantize="nf4"))
    (tmp_path / "kept").mkdir()
    for part in (tmp_path / "home" / "base").glob("*.safetensors"):
        content = bytearray(part.read_bytes())
        content[-1] ^= part.name.startswith("part-0001")
        (tmp_path / "kept" / part.name).write_bytes(content)
    held = await local_base(manifest, tmp_path / "kept", None, EventLog())
    assert held.missing(ALL) == [1]


async def test_a_checkpoint_that_cannot_be_a_base_is_refused_before_it_is_hashed(tmp_path: Path) -> None:
    folder = write(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"hidden_size is 32 and the checkpoint in .* has 64: leave hidden_size out"):
        await manifest_of(folder, tmp_path / "one", Pretrained(init=str(folder), said={"hidden_size": 32}))
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read .*: name the folder of a checkpoint in"):
        await manifest_of(tmp_path / "none", tmp_path / "two", Pretrained(init="none"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        await manifest_of(folder, tmp_path / "three", Pretrained(init=str(folder)))
    whole = make_manifest(Identity.generate().peer_id)
    with pytest.raises(ConfigError, match="trains a whole model, beside no base"):
        await local_base(whole, tmp_path / "kept", None, EventLog())


def test_a_manifest_names_base_and_adapter_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "base")
    manifest = trio.run(manifest_of, folder, tmp_path / "home", Pretrained(init=str(folder)))
    for changes in ({"base": None}, {"model": MODEL}, {"requires": (QUANTIZED,)}):
        with pytest.raises(ValueError, match=r"without its base|needs$"):
            msgspec.structs.replace(manifest, **changes)


async def test_a_fetched_part_counts_before_that_of_another_checkpoint(tmp_path: Path) -> None:
    """A user's checkpoint is of another revision, in which one block differs: that one is fetched, and it is used."""
    right = write(tmp_path / "right")
    manifest = await manifest_of(right, tmp_path / "home", Pretrained(init=str(right)))
    weights = BaseWeights.of(manifest)
    assert weights is not None
    flat = init_flat(MODEL, seed=1)
    FlatLayout.of(MODEL).views(flat)["model.layers.1.mlp.up_proj.weight"].add_(1)
    export_pretrained(tmp_path / "other", MODEL, flat, ByteTokenizer())
    held = HeldParts(EventLog(), weights, tmp_path / "kept", tmp_path / "other")
    await held.take_from_disk(ALL)
    assert held.missing(ALL) == [1]
    span = part_spans(weights)[1]
    tensors = part_tensors(ParameterFiles([right]), weights, span)
    write_part(weights, 1, tensors, tmp_path / "kept")  # as it is fetched
    await held.take_from_disk(ALL)
    assert not held.missing(ALL)
    files = ParameterFiles(held.folders)
    assert hash_state(part_tensors(files, weights, span)).root == weights.checkpoint[1], "a worker loads the same"


async def test_a_cache_with_another_revision_is_used_as_far_as_it_is_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = write(tmp_path / "right")
    manifest = await manifest_of(right, tmp_path / "home", Pretrained(init=str(right)))
    flat = init_flat(MODEL, seed=1)
    FlatLayout.of(MODEL).views(flat)["model.layers.1.mlp.up_proj.weight"].add_(1)
    export_pretrained(tmp_path / "cached", MODEL, flat, ByteTokenizer())
    monkeypatch.setattr(parts_base, "in_cache", lambda name: tmp_path / "cached")
    held = await local_base(manifest, tmp_path / "kept", None, EventLog())
    assert held.missing(ALL) == [1]
    (part,) = [number for number in ALL if number not in held.missing(ALL)]
    weights = BaseWeights.of(manifest)
    assert weights is not None
    found = part_tensors(ParameterFiles(held.folders), weights, part_spans(weights)[part])
    assert hash_state(found).root == weights.checkpoint[part]
    (tmp_path / "cached" / "model.safetensors").write_bytes(b"damaged")
    held = await local_base(manifest, tmp_path / "kept", None, EventLog())
    assert held.missing(ALL) == [0, 1] and held.folders == [tmp_path / "kept"]
