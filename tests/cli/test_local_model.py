"""`peer generate --model DIR`: a checkpoint on this machine, in a process that ends with the command."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.inference.client_view import TOLD_S
from tests.support.forking.command import peer as forked
from tests.support.forking.forked import ForkedProcess
from tests.support.process_group import REPO
from tests.swarm.gateway.served_model import decoded, encoded, tokenizer, write_checkpoint
from tests.swarm.serving.serving_swarm import reference_tokens

pytestmark = pytest.mark.process
PROMPT = "the rain in the"


def peer(*arguments: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *map(str, arguments)]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=REPO, timeout=300, check=False)


def servers_of(folder: Path) -> list[list[str]]:
    """The commands of programs, not of forks, that still serve this checkpoint."""
    return [words for process in psutil.process_iter() if str(folder) in (words := _words(process))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_checkpoint_on_this_machine_says_what_transformers_says(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder)
    ended = peer("generate", "--model", folder, "-", "--max-tokens", "24", "--threads", "1", "--json", given=PROMPT)
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    expected = reference_tokens(encoded(PROMPT), 24)
    assert answer["tokens"] == expected and answer["finish"] == "length"
    assert 0 < answer["first_token_s"] <= answer["seconds"] and answer["text"] == decoded(expected)
    assert [hop["name"] for hop in answer["route"]] == ["this machine"]
    assert not servers_of(folder)
    plain = forked("generate", "--model", folder, PROMPT, "--max-tokens", "24")
    assert plain.returncode == 0 and plain.stdout.endswith("\n") and not plain.stderr

    asked = forked("generate", "--model", folder, "--chat", PROMPT, "--max-tokens", "8", "--json")
    written = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    chat = json.loads(asked.stdout.splitlines()[-1])
    assert chat["tokens"] == reference_tokens(encoded(written), 8) and chat["prompt_tokens"] == len(encoded(written))
    assert tokenizer().decode(encoded(written), skip_special_tokens=False) == written


def test_a_checkpoint_is_computed_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    wide, narrow = tmp_path / "fp32", tmp_path / "bf16"
    write_checkpoint(wide)
    shutil.copytree(wide, narrow)
    weights = load_file(wide / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, narrow / "model.safetensors")

    def answer(folder: Path, *options: str) -> list[tuple[int, float]]:
        """The tokens and their log-probabilities, which another type changes."""
        asked = ("--max-tokens", "8", "--threads", "1", "--json", "--logprobs", "1")
        ended = forked("generate", "--model", folder, PROMPT, *asked, *options)
        told = map(json.loads, ended.stdout.splitlines())
        return [(line["token"], line["logprob"]) for line in told if line["event"] == "token"]

    own = answer(narrow)
    assert len(own) == 8 and answer(wide, "--dtype", "bf16") == own


@contextmanager
def answering(words: list[str], count: int) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """An answer that has begun to come, and the process that serves it."""
    words, pipe = [*words, "--max-tokens", str(count), "--json"], subprocess.PIPE
    with ForkedProcess("cli.main", *words, stdout=pipe, stderr=pipe, text=True, cwd=REPO) as process:
        assert process.stdout is not None
        while '"token"' not in process.stdout.readline():
            assert process.poll() is None
        started = started_by(psutil.Process(process.pid))  # that of its tokenizer is the other one
        (server,) = (child for child in started if child.children())
        yield process, server


def replace_slowly(server: psutil.Process) -> None:
    """Kill the worker of a server, and stop the one that replaces it for longer than a client waits for other servers,
    as a busy machine would."""
    (worker,) = started_by(server)
    worker.kill()
    while (new := next((child for child in started_by(server) if child != worker), None)) is None:
        time.sleep(0.01)
    new.suspend()
    time.sleep(2 * TOLD_S)
    new.resume()


def started_by(process: psutil.Process) -> list[psutil.Process]:
    """The children of a fork, without the server of forks that it has: that one has no session of its own."""
    found = []
    for child in process.children():
        with suppress(ProcessLookupError):  # it has ended
            found += [child] if os.getsid(child.pid) == child.pid else []
    return found


def test_an_answer_outlives_its_worker_and_ends_in_one_sentence_with_its_server(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder)
    words = ["generate", "--model", str(folder), PROMPT, "--threads", "1"]
    told = list[list[int]]()
    for is_struck in (False, True):
        with answering(words, 400) as (process, server):
            if is_struck:
                replace_slowly(server)
                assert process.poll() is None, "the answer had an end to wait for"
            rest, said = process.communicate()
        answer = json.loads(rest.splitlines()[-1])
        assert process.returncode == 0 and answer["failovers"] == 0, said  # the server stays, its worker is another one
        told.append(answer["tokens"])
    assert told[0] == told[1] and len(told[0]) == 400

    with answering(words, 1000) as (process, server):
        server.kill()
        rest, said = process.communicate()
    assert '"answer"' not in rest and process.returncode == 7
    assert said == (
        "peer: the process that computes the model has ended (it was killed by SIGKILL): run the command again\n"
    )

    ours, theirs = pty.openpty()  # what a person sees
    with ForkedProcess("cli.main", *words, "--max-tokens", "24", stdout=theirs, stderr=theirs, cwd=REPO) as again:
        os.close(theirs)
        seen = read_all(ours)
    assert again.returncode == 0 and seen.startswith(b"Loading ")
    assert b"24 tokens by 1 server, " in seen and b" a second, the first after " in seen


def read_all(terminal: int) -> bytes:
    """Return what comes to a terminal until its last writer ends, and close it."""
    found = b""
    with os.fdopen(terminal, "rb", buffering=0) as reader, suppress(OSError):  # EIO is a terminal's end
        while piece := reader.read(4096):
            found += piece
    return found


def test_a_prompt_beyond_the_context_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder)
    ended = forked("generate", "--model", folder, "-", given="x " * 2500)
    assert ended.returncode == 2 and not ended.stdout
    (line,) = ended.stderr.splitlines()
    assert line.startswith("peer: prompt and answer have 5128 tokens and the model's context 4096: shorten the prompt")


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("none", 2, "give either INVITE or --model"),
        ("folder", 2, "is no folder"),
        ("config", 6, "cannot be read"),
        ("tokenizer", 6, "has no tokenizer.json: copy it"),
        ("family", 2, "model_type is 'gpt2'"),
        ("nan", 6, "holds NaN or infinity"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(tmp_path: Path, damage: str, code: int, words: str) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder)
    if damage == "config":
        (folder / "config.json").unlink()
    elif damage == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "family":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    elif damage == "nan":
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][3] = torch.nan
        save_file(weights, folder / "model.safetensors")
    named = tmp_path / "nowhere" if damage == "folder" else folder
    start = peer if damage == "nan" else forked
    ended = start("generate") if damage == "none" else start("generate", "--model", named, "x")
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
    assert start is forked or not servers_of(folder)
