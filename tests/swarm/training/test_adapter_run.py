"""A run that trains an adapter beside a frozen base: real processes, one of which has the base's checkpoint."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.config import ModelConfig
from peer.data.tokenizer import ByteTokenizer
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from peer.model.weight_files import WEIGHTS
from swarm.inference.client import open_model
from swarm.run.invite import Invite
from tests.support.forking.command import peer_meanwhile
from tests.support.peer_process import PeerProcess
from tests.swarm.serving.served_run import ask, compared
from tests.swarm.support.swarm_harness import RUN_TOML, open_swarm

pytestmark = pytest.mark.process

BASE = ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=128, max_seq_len=128)


def tuning(base: Path, quantize: str = "", stages: int = 1) -> str:
    """Return a RUN.toml that tunes the checkpoint in `base`."""
    before, _, rest = RUN_TOML.partition("[model]")
    data = rest[rest.index("[data]") :]
    adapter = "[adapter]\nrank = 4\nalpha = 8\n" + "dropout = 0.1\n" * (stages > 1)
    model = f'[model]\nbase = "{base}"\n{quantize}\n{adapter}\n[tokenizer]\nsource = "bytes"\n\n'
    return before + model + data + f"\n[pipeline]\nstages = {stages}\nmicro_batch = 2\n" * (stages > 1)


async def export(*arguments: str | Path) -> None:
    done = await peer_meanwhile("export", *arguments)
    assert done.returncode == 0, done.stderr


def parts(peer: PeerProcess) -> list[bytes]:
    """Return the parts of the base that a peer has fetched."""
    return sorted(path.read_bytes() for path in (peer.home / "base").glob("*.safetensors"))


def served(peer: PeerProcess) -> set[int]:
    """Return the rounds whose commits a peer has served."""
    return {fact.fields["round"] for fact in peer.all("commit_served")}


def same_logits(base: Path, adapter: Path, whole: Path) -> None:
    """Check that PEFT makes of the base and the adapter what the merged model is."""
    peft: Any = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")
    tokens = torch.arange(40).view(1, -1)
    with torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
        before = plain(tokens).logits
        tuned = peft.PeftModel.from_pretrained(plain, adapter).eval()(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(whole).eval()(tokens).logits
    torch.testing.assert_close(tuned, merged, atol=1e-4, rtol=1e-4)
    assert float((tuned - before).abs().max()) > 1e-2


@pytest.mark.parametrize("quantize", ["", pytest.param('quantize = "nf4"', marks=pytest.mark.soak)])
async def test_members_fetch_the_base_train_beside_it_and_serve_what_they_train(tmp_path: Path, quantize: str) -> None:
    """One is killed and one joins. The answer has the tokens of the merged export, by transformers; so has PEFT."""
    base, adapter, whole = tmp_path / "base", tmp_path / "adapter", tmp_path / "whole"
    export_pretrained(base, BASE, init_flat(BASE, seed=1), ByteTokenizer())
    kept = (base / WEIGHTS).read_bytes()
    async with open_swarm(tmp_path, run=tuning(base, quantize), outer="[outer]\nsteps = 4") as swarm:
        several = ("--devices", "cpu:2", "--layout", "ddp" if quantize else "fsdp")
        first, owner = swarm.join("first", *several), swarm.join("owner", "--base", str(base))
        await swarm.committed(1, first, owner)
        owner.kill()
        late = swarm.join("late", "--serve")
        await swarm.committed(late.round + 3, late)
        assert parts(late) and parts(late) == parts(first)
        losses = [fact.fields["loss"] for fact in first.commits]
        assert losses[-1] < losses[0]
        await export(swarm.invite, "--merge", "--out", tmp_path / "fetched")
        async with open_model(Invite.parse(swarm.invite.read_text())) as model:
            swarm.coordinator.freeze()  # without its vote nothing is committed
            await late.until(lambda: late.round in served(late), "service of the last commit")
            while (found := await ask(model, 65)).round < late.round:
                await model.servers.refresh(0.0)
        late.process.send_signal(signal.SIGINT)
        assert await late.wait_exit() == 130
    await export("--home", late.home, "--out", adapter)
    await export("--home", late.home, "--merge", "--out", whole)
    assert (base / WEIGHTS).read_bytes() == kept
    if not quantize:
        assert found.round == late.round and compared([found], {found.round: whole}) == (1, 0)
        same_logits(base, adapter, whole)


async def test_stages_train_an_adapter_beside_their_blocks_of_a_tied_base(tmp_path: Path) -> None:
    """Each member has the parts of its stage, the last one also the first part, for its head."""
    base, adapter, whole = tmp_path / "base", tmp_path / "adapter", tmp_path / "whole"
    export_pretrained(base, BASE, init_flat(BASE, seed=1), ByteTokenizer())
    async with open_swarm(tmp_path, run=tuning(base, stages=2), outer="[outer]\nsteps = 4", min_peers=1) as swarm:
        first = swarm.join("first", "--stage", "0", "--base", str(base))
        last = swarm.join("last", "--stage", "1")
        await swarm.committed(4, first, last)
        assert not parts(first) and len(parts(last)) == 2
        losses = [fact.fields["loss"] for fact in last.commits]
        assert losses[-1] < losses[0]
        first.process.send_signal(signal.SIGINT)
        last.process.send_signal(signal.SIGINT)
        assert [await first.wait_exit(), await last.wait_exit()] == [130, 130]
    homes = ("--home", first.home, "--home", last.home)
    await export(*homes, "--out", adapter)
    await export(*homes, "--merge", "--base", base, "--out", whole)
    same_logits(base, adapter, whole)
