"""A restarted coordinator continues the run of its home, and refuses a RUN.toml that differs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cli.templates import template, with_settings
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError
from peer.events import EventLog
from peer.files import write_atomically
from peer.identity import Identity
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from swarm.coordinator.reopen import create_or_reopen, watch_beginning
from swarm.membership.bans import banned_in, extend_bans
from swarm.run.config import parse_run_config
from swarm.run.home import Home
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import load_run_files

PLAIN = template()
CUT = with_settings(with_settings(PLAIN, "model", {"tie_embeddings": False}), "pipeline", {"stages": 2})
FOLDER = with_settings(PLAIN, "data", {"source": "folder"})


async def coordinate(home: Path, text: str | None) -> str:
    """Create or reopen the run; return its id."""
    identity = Identity.load_or_create(Home(home).identity)
    run = None if text is None else parse_run_config(text)
    run_files, _, _ = await trio.to_thread.run_sync(create_or_reopen, home, run, identity, EventLog())
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
    Home(tmp_path / "home").unbegun.unlink()
    with pytest.raises(ConfigError, match=rf"has another \[{section}\] than RUN\.toml.* --home .*leave RUN\.toml out"):
        await coordinate(tmp_path / "home", with_settings(CUT, section, settings))
    with pytest.raises(ConfigError, match="holds the run 'embedded example'"):
        await coordinate(tmp_path / "home", CUT.replace("embedded example", "another"))
    assert await coordinate(tmp_path / "home", None) == run_id


async def test_other_settings_beside_a_checkpoint_are_refused(tmp_path: Path) -> None:
    text = pretrained(tmp_path / "hub")
    await coordinate(tmp_path / "home", text)
    Home(tmp_path / "home").unbegun.unlink()
    with pytest.raises(ConfigError, match=r"has another \[inner\] than"):
        await coordinate(tmp_path / "home", text.replace("lr = 8e-3", "lr = 4e-3"))
    with pytest.raises(ConfigError, match=r"has another \[model\], \[tokenizer\] than"):
        await coordinate(tmp_path / "home", PLAIN.replace("layers = 2", "layers = 4"))


async def test_a_run_that_never_began_is_replaced(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    first = await coordinate(home.path, CUT)
    key = home.identity.read_bytes()
    write_atomically(home.stage(0, 2).agreement / "records.log", b"of the first run")
    write_atomically(home.invite, b"of the first run")
    write_atomically(home.path / "monitor.db", b"of a person")
    banned, identity = Identity.generate().peer_id, Identity.load_or_create(home.identity)
    extend_bans(home.bans, identity, run_in(home), [banned])
    second = await coordinate(home.path, PLAIN.replace("embedded example", "another"))
    assert second != first and home.identity.read_bytes() == key
    assert not home.invite.exists() and not (home.path / "stage-0").exists()
    assert (home.path / "monitor.db").read_bytes() == b"of a person"
    assert banned_in(home.bans, run_in(home)) == {banned}
    aside = home.path / "replaced"
    assert run_in(Home(aside)).run_id == first and (aside / "stage-0" / "agreement" / "records.log").exists()
    third = await coordinate(home.path, PLAIN)
    assert run_in(Home(aside)).run_id == second and not (aside / "stage-0").exists()
    assert await coordinate(home.path, PLAIN) == third == await coordinate(home.path, None)


@pytest.mark.parametrize("which", ["group", "record"])
async def test_the_first_commit_ends_that(tmp_path: Path, autojump_clock: object, which: str) -> None:
    home, head = Home(tmp_path), SimpleNamespace(round=0)
    write_atomically(home.unbegun, b"")
    view: dict[str, Any] = {"peer": SimpleNamespace(round=-1)}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_beginning, home, [SimpleNamespace(head=head)], lambda: view)
        await trio.sleep(60)
        assert home.unbegun.exists()
        if which == "group":
            head.round = 1
        else:
            view["peer"].round = 1
        await trio.sleep(60)
        assert not home.unbegun.exists() and not nursery.child_tasks


def run_in(home: Home) -> Manifest:
    kept = load_run_files(home.path)
    assert kept is not None
    return open_manifest(kept[0])
