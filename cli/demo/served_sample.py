"""The end of a quickstart: block servers of the model that it trained, and a turn of a chat through the network.

With faults, one of three servers is killed in the middle of the answer; the other two hold all blocks, so the answer
continues.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.demo.child_processes import ChildPeer, Children, children
from cli.demo.cluster import LOOPBACK
from cli.terminal.lines import is_terminal, say
from cli.terminal.stream import write_text
from peer.catalogue.serving import BlocksServed
from peer.decoding import MALFORMED
from peer.errors import RoundError
from swarm.gateway.template import ChatMessage, plain_conversation
from swarm.inference.coverage import blocks_text
from swarm.run.home import Home

MESSAGE: Final = "How do I read a file?"
TOKENS: Final = 200
STRIKE_AT: Final = 60
"""The token after which a server is killed."""
START_S: Final = 180.0
POLL_S: Final = 0.1


@dataclass
class ServedSample:
    """What came through the network."""

    text: str
    answer: dict[str, Any]
    """The last line of `peer generate --chat --json`."""
    killed: str = ""
    """The name of the server that was killed meanwhile."""


def serve_sample(home: Path, homes: Sequence[Path], *, kills: bool) -> ServedSample:
    """Export the model from `homes`, serve it, and ask it. Raises RoundError if some of it fails."""
    model = home / "model"
    run_peer(["export", *(word for path in homes for word in ("--home", str(path))), "--out", str(model), "--force"])
    layers = int(msgspec.json.decode((model / "config.json").read_bytes())["num_hidden_layers"])
    with children() as group:
        servers = _start(group, home, model, layers, kills)
        invite = Home(servers[0].home).invite
        return _ask(servers, str(invite), kills)


def _start(group: Children, home: Path, model: Path, layers: int, kills: bool) -> list[ChildPeer]:
    """Start servers that together hold all blocks; with `kills`, all blocks twice."""
    half = layers // 2
    spans = [(0, half), (half, layers)] if half else [(0, layers)]
    if kills:
        spans.insert(0, (0, layers))
    servers = list[ChildPeer]()
    for number, (first, end) in enumerate(spans, 1):
        source = [str(Home(servers[0].home).invite)] if servers else ["--model", str(model)]
        name = f"server-{number}"
        options = ["--blocks", f"{first}:{end}", "--name", name, "--device", "cpu", "--threads", "1", *LOOPBACK]
        server = group.start(name, home / name, ["serve", *source, *options], threads=1)
        servers.append(server)
        _wait_serving(server)
        _note(f"{name} serves {blocks_text(first, end)}")
    return servers


def _wait_serving(server: ChildPeer) -> None:
    deadline = time.monotonic() + START_S
    while not any(isinstance(event, BlocksServed) for _, event in server.events.heard()):
        if not server.alive or time.monotonic() > deadline:
            raise RoundError(f"{server.name} does not serve ({server.log_tail()}): read {server.home}.log")
        time.sleep(POLL_S)


def _ask(servers: Sequence[ChildPeer], invite: str, kills: bool) -> ServedSample:
    command = [sys.executable, "-m", "cli.main", "generate", invite, MESSAGE, "--chat", "--max-tokens", str(TOKENS)]
    command += ["--temperature", "1", "--top-p", "0.9", "--seed", "1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    asked = plain_conversation([ChatMessage("user", MESSAGE)])  # the model has no chat template
    sample, count, route = ServedSample("", {}), 0, list[dict[str, Any]]()
    assert process.stdout is not None and process.stderr is not None
    try:
        for line in process.stdout:
            fact = _fact(line)
            if fact.get("event") == "token":
                count += 1
                if is_terminal():
                    write_text((asked if count == 1 else "") + str(fact["text"]))
                if kills and count == STRIKE_AT and route:
                    victim = next(server for server in servers if _names_server(server, route[0]))
                    victim.kill()
                    sample.killed = victim.name
                    _note(f"killed {victim.name} (SIGKILL) after {count} tokens", amid=True)
            elif fact.get("event") == "route":
                begins, route = not route, fact["route"]
                names = " and ".join(str(hop["name"]) for hop in route)
                _note(f"the answer {'comes' if begins else 'goes on'} through {names}", amid=count > 0)
            elif fact.get("event") == "answer":
                sample.answer, sample.text = fact, asked + str(fact["text"])
                if is_terminal():
                    say("")
        ended = process.wait(START_S)
        if ended or not sample.answer:
            raise RoundError(f"peer generate ended with exit code {ended}: {process.stderr.read()[-500:]}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    return sample


def _note(text: str, *, amid: bool = False) -> None:
    """Say what happens, as during the training. `amid`: the answer is being shown."""
    if amid and is_terminal():
        say("")
    say(f"{time.strftime('%H:%M:%S')}  {text}", err=True)


def _names_server(server: ChildPeer, hop: dict[str, Any]) -> bool:
    """Whether a hop of a route is at that server."""
    return bool(hop.get("name") == server.name)


def _fact(line: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except MALFORMED:
        return {}


def run_peer(arguments: Sequence[str]) -> str:
    """Run a command as a user would, and return what it prints. Raises RoundError if it fails."""
    done = subprocess.run([sys.executable, "-m", "cli.main", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RoundError(f"peer {arguments[0]} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
