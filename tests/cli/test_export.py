"""`peer export` from disk, and what a failed export leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
from safetensors.torch import save_file
from torch import Tensor

from cli.templates import template
from peer.config import ModelConfig
from peer.data.tokenizer import ByteTokenizer
from peer.events import EventLog
from peer.identity import Identity
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from swarm.coordinator.create_run import create_run
from swarm.run.config import parse_run_config
from swarm.run.home import Home
from swarm.run.manifest import open_manifest
from swarm.run.manifest_transfer import load_run_files
from tests.cli.support.typed import Peer, said
from tests.cli.test_pipeline_input import home_with_checkpoints

MODEL = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=16, max_seq_len=64)


async def test_the_coordinator_has_no_trained_model_to_export(peer: Peer, tmp_path: Path) -> None:
    home, out = tmp_path / "coordinator", tmp_path / "model"
    authority = Identity.load_or_create(Home(home).identity)
    await trio.to_thread.run_sync(create_run, home, parse_run_config(template()), authority, EventLog())
    sentence = said(peer("export", "--home", home, "--out", out), 6)
    assert f"{home} is the coordinator's home" in sentence and "--home of a peer that trained" in sentence
    assert "INVITE" in sentence and not out.exists()
    run_files = load_run_files(home)
    assert run_files is not None
    trained = await home_with_checkpoints(tmp_path / "peer", open_manifest(run_files[0]), authority, [0])
    ended = peer("export", "--home", home, "--home", trained, "--out", out)
    assert ended.code == 0 and "Round 4 of" in ended.stdout


def test_an_interrupted_export_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(weights: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
        save_file(dict(weights), path, metadata=dict(metadata))
        raise KeyboardInterrupt

    monkeypatch.setattr("peer.model.huggingface.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_pretrained(tmp_path, MODEL, init_flat(MODEL, 0), ByteTokenizer())
    assert not list(tmp_path.glob("model.safetensors*")) and not (tmp_path / "config.json").exists()
