"""A run never says which folder of this machine is read: only `peer join --data` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from cli.templates import template
from tests.support.forking.command import peer
from tests.support.peer_process import POLL_S
from tests.support.process_group import REPO
from tests.swarm.support.swarm_harness import open_swarm
from tests.swarm.training.test_last_round import TWO_STAGES

AUDITED = """
import os, sys
private, seen = sys.argv[1], []

def note(event, arguments):
    if event in ("open", "os.scandir", "os.listdir") and arguments and isinstance(arguments[0], (str, os.PathLike)):
        if os.fspath(arguments[0]).startswith(private):
            seen.append(f"{event} {arguments[0]}")

sys.addaudithook(note)
sys.argv = ["peer", *sys.argv[2:]]
from cli.main import main
try:
    main()
finally:
    print("SEEN", seen, flush=True)
"""


@pytest.mark.process
async def test_without_data_a_folder_run_is_refused_and_no_folder_is_read(tmp_path: Path) -> None:
    private = tmp_path / "text"  # what the harness would name with --data
    async with open_swarm(tmp_path) as swarm:
        join = ["join", str(swarm.invite), "--home", str(tmp_path / "p"), "--listen", "/ip4/127.0.0.1/tcp/0"]
        command = [sys.executable, "-c", AUDITED, str(private), *join]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    assert "peer: this run trains on text of your own: name a file or folder of text with --data PATH" in done.stderr
    assert "SEEN []" in done.stdout
    assert not (tmp_path / "p" / "worker.log").exists(), "no worker was started"


@pytest.mark.process
async def test_a_feeder_tells_what_it_has_read(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, run=TWO_STAGES) as swarm:
        (tmp_path / "text" / "notes.docx").write_bytes(b"")
        feeder = swarm.join("feeder", "--role", "feeder")
        told = (await feeder.wait_for("corpus_read")).fields
        account = "".join(told["account"])
        with trio.fail_after(300):
            while account not in feeder.log.read_text():  # the view reads events a little later
                await trio.sleep(POLL_S)
    total = told["train_bytes"] + told["held_out_bytes"]
    assert 0.025 * total < told["held_out_bytes"] < 0.1 * total
    assert "skipped 1 .docx" in account


@pytest.mark.process
def test_a_path_or_a_compiler_in_run_toml_is_refused_with_the_option_for_it(tmp_path: Path) -> None:
    for line, option in (("[data]\npath = '/home'", "--data DIR"), ("[inner]\ncompile = true", "--compile")):
        section = line.split("\n")[0]
        (tmp_path / "run.toml").write_text(template().replace(section, line, 1))
        done = peer("coordinate", tmp_path / "run.toml", "--home", tmp_path / "c")
        assert done.returncode == 2 and option in done.stderr, done.stderr
