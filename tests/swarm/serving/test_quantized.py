"""Models served in 8 and 4 bits by real processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peer.config import Quantization
from peer.errors import ConfigError
from peer.identity import Identity
from peer.model.quantize import bitsandbytes
from swarm.parts.weights import part_bytes, part_spans
from swarm.run.features import QUANTIZED
from swarm.run.home import Home
from swarm.run.manifest import open_served_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.serving.create_model import PreparedModel
from swarm.serving.peer import ServeConfig, _reopen_or_prepare
from tests.peer.inference.quantized_reference import quantized_copy, save_quantized
from tests.swarm.gateway.served_model import write_checkpoint
from tests.swarm.serving import both_readers
from tests.swarm.serving.serving_swarm import ServingSwarm, open_serving, reference_model
from tests.swarm.serving.test_serving import GREEDY, ask, say

PROMPT = list(b"Once upon a time there was a swarm")


def reference_tokens(quantization: Quantization, count: int) -> list[int]:
    """Return what `transformers` with bitsandbytes' linear layers says after the prompt, greedily."""
    ids = torch.tensor([PROMPT])
    model = quantized_copy(reference_model(), quantization)
    out = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return [int(token) for token in out[0, ids.shape[1] :]]


@pytest.mark.process
@pytest.mark.parametrize("quantization", ["nf4", pytest.param("int8", marks=pytest.mark.soak)])
async def test_servers_fetch_the_codes_and_an_answer_survives_a_kill(
    tmp_path: Path, quantization: Quantization
) -> None:
    """The founder quantizes; two others fetch half or a quarter of the bytes, and say the same, also after a kill."""
    async with open_serving(tmp_path) as swarm:
        founder = await swarm.serve("s0", "0:3", "--quantize", quantization)
        second = await swarm.serve("s1", "3:6")
        await swarm.serve("s2", "3:6")
        check_parts(swarm, quantization)
        wanted = reference_tokens(quantization, 24)
        async with swarm.client() as model:
            whole = await ask(model, PROMPT, 24)
            session = model.session(GREEDY)
            said = await say(session, PROMPT, 24, at={8: second.kill})
            session.close()
        assert said == whole
        assert whole == wanted
        assert founder.alive


def check_parts(swarm: ServingSwarm, quantization: Quantization) -> None:
    """Check that all servers hold the same bytes of the parts that they share, of the planned size."""
    homes = [swarm.servers[name].home for name in ("s0", "s1", "s2")]
    kept = load_run_files(homes[0])
    assert kept is not None
    manifest = open_served_manifest(kept[0])
    assert manifest.quantization == quantization and QUANTIZED in manifest.requires
    for number, span in enumerate(part_spans(manifest)):
        files = [path for home in homes if (path := home / "weights" / f"part-{number:04}.safetensors").exists()]
        assert len(files) == (1 if number < 3 else 3)
        assert len({path.read_bytes() for path in files}) == 1
        assert sum(value.nbytes for value in load_file(files[0]).values()) == part_bytes(manifest, span)


def test_what_bitsandbytes_compiles_is_compiled_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each server of codes imports torch's compiler as it starts, for functions that most never call."""
    (tmp_path / "bitsandbytes.py").write_text(
        "import torch\ndef double(x):\n    return 2 * x\ncompiled = torch.compile(double, dynamic=False)\n"
        "@torch.compile(mode='default')\ndef triple(x):\n    return 3 * x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # so that what is there now is put back
    del sys.modules["bitsandbytes"]
    made = list[dict[str, Any]]()

    def compiler(function: Any, **options: Any) -> Any:
        made.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compiler)
    library = bitsandbytes("a test")
    assert not made and torch.compile is compiler
    assert [library.compiled(2), library.compiled(x=3)] == [4, 6]
    assert made == [{"dynamic": False}], "once"
    assert library.triple(2) == 6 and made[1:] == [{"mode": "default"}]


def test_a_quantization_is_for_a_model_that_is_founded(tmp_path: Path) -> None:
    folder, home = tmp_path / "model", tmp_path / "home"
    write_checkpoint(folder)
    identity = Identity.load_or_create(Home(home).path / "key")

    def config(quantization: Quantization | None) -> ServeConfig:
        return ServeConfig(home=home, folder=folder, quantization=quantization)

    prepared = _reopen_or_prepare(config("int8"), identity)
    assert isinstance(prepared, PreparedModel) and prepared.quantization == "int8" and prepared.dtype == "fp32"
    both_readers.created(prepared, home, identity)
    assert _reopen_or_prepare(config(None), identity) is not None
    with pytest.raises(ConfigError, match="serves its model in int8: drop --quantize, or give another --home"):
        _reopen_or_prepare(config("nf4"), identity)


def test_a_saved_quantization_is_kept_and_no_other_is_made_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder)
    save_quantized(quantized_copy(reference_model(), "nf4", nested=True), folder, "nf4")
    identity = Identity.generate()
    found = _reopen_or_prepare(ServeConfig(home=tmp_path / "home", folder=folder), identity)
    assert isinstance(found, PreparedModel) and found.quantization == "nf4"
    with pytest.raises(ConfigError, match="quantized in nf4: drop --quantize, or take one in bf16"):
        _reopen_or_prepare(ServeConfig(home=tmp_path / "home", folder=folder, quantization="int8"), identity)


def test_parts_of_a_copy_of_the_checkpoint_are_the_founders(tmp_path: Path) -> None:
    """Who has the checkpoint makes the parts of it instead of fetching them."""
    folder = tmp_path / "model"
    write_checkpoint(folder)
    roots = []
    for name in ("a", "b"):
        home = tmp_path / name
        home.mkdir()
        prepared = _reopen_or_prepare(ServeConfig(home=home, folder=folder, quantization="nf4"), Identity.generate())
        assert isinstance(prepared, PreparedModel)
        roots.append(both_readers.created(prepared, home, Identity.load_or_create(home / "key")).manifest.checkpoint)
    assert roots[0] == roots[1]
