"""The base of a run that tunes an adapter: hashed once, and found again on a machine by its hashes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import trio

from peer.config import AdapterConfig, ModelConfig
from peer.data.tokenizer import ByteTokenizer
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.identity import Identity
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from swarm.coordinator.base_model import hash_base
from swarm.parts.base import local_base
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
