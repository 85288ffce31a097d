"""`peer serve`: what is wrong is said before the checkpoint is read, a screen that shows who uses it, and a next
start."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.run.home import Home
from tests.cli.support.seen_in import ROOT, forked
from tests.cli.support.typed import Peer, said
from tests.support.forking.forked import ForkedProcess
from tests.support.newer_trio import run_abandonable
from tests.swarm.gateway.served_model import write_checkpoint
from tests.swarm.serving.serving_swarm import open_serving

HERE = "/ip4/127.0.0.1/tcp/0"


def damaged_checkpoint(folder: Path) -> Path:
    """Write a checkpoint that is refused as soon as its values are read."""
    write_checkpoint(folder)
    path = folder / "model.safetensors"
    save_file({name: torch.full_like(weight, torch.nan) for name, weight in load_file(path).items()}, path)
    return folder


def test_what_is_wrong_is_said_before_the_checkpoint_is_read(tmp_path: Path, peer: Peer) -> None:
    model = damaged_checkpoint(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wrong = (
            ("--blocks", "4:7", 2, "--blocks 4:7 is not inside the model's 6 blocks: choose others"),
            ("--memory", "0.000001", 5, "there is no memory for a single block: free some, or raise --memory"),
            ("--device", "cuda:77", 2, "cuda"),
            ("--template", "chatml", 2, "it has 1 (default)"),
            ("--template", "./no-such.jinja", 2, "no-such.jinja"),
            ("--listen", f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}", 5, "in use"),
        )
        for number, (option, value, code, words) in enumerate(wrong):
            home = tmp_path / f"home-{number}"
            ended = peer("serve", "--model", model, "--home", home, "--listen", HERE, option, value)
            assert words in said(ended, code), ended.stderr
            assert "Reading" not in ended.stderr and "Left" not in ended.stderr
    ended = peer("serve", "--model", model, "--home", tmp_path / "home", "--listen", HERE)
    assert "holds NaN or infinity" in said(ended, 6), "only now it is read"
    assert "Reading the checkpoint: " in ended.stderr and "Left" not in ended.stderr


def test_a_checkpoint_that_has_gone_is_named(tmp_path: Path, peer: Peer) -> None:
    home = Home(tmp_path)
    home.served.write_text(json.dumps({"model": str(tmp_path / "gone"), "blocks": [0, 3]}))
    told = said(peer("serve", "--home", tmp_path), 2)
    assert f"the checkpoint {tmp_path / 'gone'}, which was served" in told
    assert told.endswith("put it back, or name its folder with --model")


@asynccontextmanager
async def client() -> AsyncIterator[None]:
    """Have a client that asks the model `tiny` for a long answer, until the end of the block."""
    words = ("generate", "tiny", "Once", "--max-tokens", "3000")
    with ForkedProcess("cli.main", *words, stdout=DEVNULL, stderr=DEVNULL, env=dict(os.environ)) as process:
        try:
            yield
            process.send_signal(signal.SIGINT)
            await run_abandonable(process.wait, 60)
        finally:
            process.kill()


@pytest.mark.process
async def test_the_screen_shows_who_uses_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path / "homes"))
    model, home = tmp_path / "tiny", tmp_path / "homes" / "serve-tiny"
    write_checkpoint(model)
    words = ("serve", "--model", os.path.relpath(model, ROOT), "--threads", "1", "--listen", HERE)
    async with forked(80, *words) as (shown, server):
        await shown.until(lambda text: "peer chat tiny   peer api tiny" in text)
        invite = (home / "invite").read_text().strip()
        for use in (f"peer serve {invite}", f'peer generate {invite} "', f"peer chat {invite}", f"peer api {invite}"):
            assert use in shown.text, shown.rows
        async with client(), client():
            await shown.until(lambda text: "2 sessions   2 clients" in text)
            counts = list[int]()
            while len(set(counts)) < 3:
                found = re.findall(r"([\d,]+) tokens so far", shown.text)
                counts.append(int(found[-1].replace(",", "")))
                await shown.changed.wait()
            assert counts == sorted(counts)
        await shown.until(lambda text: "0 sessions   0 clients" in text)
        server.send_signal(signal.SIGINT)
        assert await run_abandonable(server.wait, 60) == 130
        await shown.until(lambda text: f"Left. Serve again: `peer serve --home {home}`." in text)
    kept = json.loads(Home(home).served.read_text())
    assert kept == {"model": str(model), "threads": 1, "listen": [HERE]}, "also from another folder"


@pytest.mark.process
async def test_a_home_alone_continues(tmp_path: Path) -> None:
    """As the founder's, with its checkpoint and blocks, and as that of a server which came by an invite."""
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm:
        for name, blocks in (("s0", (0, 3)), ("s1", (3, 6))):
            server = swarm.servers[name]
            server.interrupt()
            assert await server.wait_exit() == 130
            assert (
                f"Left. Serve again: `peer serve --home {server.home}`." in server.home.with_suffix(".log").read_text()
            )
            server.arguments, since = ("serve",), server.mark()
            swarm.group.restart(server)
            served = await server.wait_for("blocks_served", since=since)
            assert (served.fields["first"], served.fields["end"]) == blocks
        phases = [fact.fields["phase"] for fact in swarm.servers["s1"].all("loading_ended")]
        assert phases[:2] == ["fetch", "load"], "it has no checkpoint"
        assert phases[2:] == ["check", "load"], "it keeps what it has fetched"
