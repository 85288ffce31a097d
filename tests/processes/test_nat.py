"""Peers behind two NATs and one in public reach each other: through a relay, and past the NATs where those let them.

Runs where network namespaces can be made (root, ip, iptables); else it says why not.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking.forked import ForkedProcess
from tests.support.nat.lab import PUBLIC_IP, Lab, Unavailable, nat_lab

pytestmark = pytest.mark.process


class Child:
    """A process that talks JSON lines; gone after its block."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended with code {self._process.wait()}"
        return json.loads(line)

    def tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()


@contextmanager
def _child(namespace: str, *program: str) -> Iterator[Child]:
    pipe = subprocess.PIPE
    with ForkedProcess(*program, stdin=pipe, stdout=pipe, text=True, namespace=namespace) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


@pytest.fixture
def lab_of() -> Iterator[Callable[[bool], Lab]]:
    with ExitStack() as stack:

        def make(random_ports: bool) -> Lab:
            try:
                return stack.enter_context(nat_lab(random_ports))
            except Unavailable as reason:
                pytest.skip(str(reason))

        yield make


@pytest.mark.parametrize("random_ports", [False, True], ids=["ports kept", "random ports"])
def test_peers_behind_nat_form_one_group(lab_of: Callable[[bool], Lab], tmp_path: Path, random_ports: bool) -> None:
    lab = lab_of(random_ports)
    with ExitStack() as children:
        listen = f"/ip4/{PUBLIC_IP}/tcp/4001"
        relay_command = ("cli.main", "relay", "--json", "--listen", listen, "--home", str(tmp_path))
        relay = children.enter_context(_child(lab.namespace("public"), *relay_command))
        (address,) = relay.hear()["addresses"]
        node = "tests.support.nat.node"
        nodes = {
            "a": children.enter_context(_child(lab.namespace("home-a"), node, address)),
            "b": children.enter_context(_child(lab.namespace("home-b"), node, address)),
            "public": children.enter_context(_child(lab.namespace("public"), node)),
        }
        told = {name: node.hear() for name, node in nodes.items()}
        for child in nodes.values():
            child.tell({"know": {fact["peer"]: fact["addresses"] for fact in told.values()}})

        def reach(caller: str, callee: str) -> str:
            nodes[caller].tell({"reach": told[callee]["peer"]})
            got = nodes[caller].hear()
            assert got.get("intact"), got
            assert got["theirs"] == {"public": "direct"}.get(got["kind"], got["kind"]), got
            return str(got["kind"])

        assert reach("b", "a") == ("relayed" if random_ports else "hole-punched")
        assert reach("a", "public") == "public"
        assert reach("public", "b") == "public"  # through the relay at first, then b dials back
