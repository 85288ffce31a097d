"""A restarted coordinator continues the run of its home, and refuses a RUN.toml that differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cli.templates import template, with_settings
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError
from peer.events import EventLog
from peer.identity import Identity
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from swarm.coordinator.coordinator import CoordinatorConfig, _create_or_reopen
from swarm.run.config import parse_run_config
from swarm.run.home import Home
from swarm.run.manifest import open_manifest

PLAIN = template()
CUT = with_settings(with_settings(PLAIN, "model", {"tie_embeddings": False}), "pipeline", {"stages": 2})
FOLDER = with_settings(PLAIN, "data", {"source": "folder"})


async def coordinate(home: Path, text: str | None) -> str:
    """Create or reopen the run; return its id."""
    identity = Identity.load_or_create(Home(home).identity)
    config = CoordinatorConfig(home, None if text is None else parse_run_config(text))
    run_files, _, _ = await trio.to_thread.run_sync(_create_or_reopen, config, identity, EventLog())
    return open_manifest(run_files).run_id


def pretrained(folder: Path) -> str:
    model = parse_run_config(PLAIN).model
    assert model is not None
    export_pretrained(folder, model, init_flat(model, 7), ByteTokenizer())
    before, _, rest = PLAIN.partition("[model]")
    return f"{before}[model]\ninit = {str(folder)!r}\n{rest[rest.index('[data]') :]}"


@pytest.mark.parametrize("kind", ["plain", "cut", "folder", "pretrained", "tokenizer"])
async def test_the_same_settings_continue_the_run(tmp_path: Path, kind: str) -> None:
    from_hub = pretrained(tmp_path / "hub")
    with_file = with_settings(PLAIN, "tokenizer", {"source": str(tmp_path / "hub")})
    text = {"plain": PLAIN, "cut": CUT, "folder": FOLDER, "pretrained": from_hub, "tokenizer": with_file}[kind]
    run_id = await coordinate(tmp_path / "home", text)
    spelt_out = with_settings(with_settings(text, "run", {"seed": 0}), "inner", {"weight_decay": 0.1})
    assert spelt_out != text
    for same in (text, spelt_out, None):
        assert await coordinate(tmp_path / "home", same) == run_id
    (tmp_path / "hub" / "tokenizer.json").unlink()
    assert await coordinate(tmp_path / "home", text) == run_id, "the run has its own copy of the tokenizer"


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("inner", {"lr": 4e-3}),
        ("run", {"rounds": 24}),
        ("model", {"layers": 4}),
        ("data", {"seq_len": 64}),
        ("outer", {"steps": 50}),
        ("codec", {"up": "int4"}),
        ("pipeline", {"recompute": True}),
        ("tokenizer", {"source": "hub"}),
        ("inner", {"dtype": "fp32", "batch_size": 16}),
    ],
)
async def test_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, settings: dict[str, int | str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pretrained(tmp_path / "hub")
    run_id = await coordinate(tmp_path / "home", CUT)
    with pytest.raises(ConfigError, match=rf"has another \[{section}\] than RUN\.toml.* --home .*leave RUN\.toml out"):
        await coordinate(tmp_path / "home", with_settings(CUT, section, settings))
    with pytest.raises(ConfigError, match="holds the run 'embedded example'"):
        await coordinate(tmp_path / "home", CUT.replace("embedded example", "another"))
    assert await coordinate(tmp_path / "home", None) == run_id


async def test_other_settings_beside_a_checkpoint_are_refused(tmp_path: Path) -> None:
    text = pretrained(tmp_path / "hub")
    await coordinate(tmp_path / "home", text)
    with pytest.raises(ConfigError, match=r"has another \[inner\] than"):
        await coordinate(tmp_path / "home", text.replace("lr = 8e-3", "lr = 4e-3"))
    with pytest.raises(ConfigError, match=r"has another \[model\], \[tokenizer\] than"):
        await coordinate(tmp_path / "home", PLAIN.replace("layers = 2", "layers = 4"))
