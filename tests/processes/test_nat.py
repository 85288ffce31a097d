"""Peers behind two NATs and one in public reach each other: through a relay, and past the NATs where those let them.
Without a relay, a peer behind a NAT takes part in a run as a client.

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
from tests.support.peer_process import PeerProcess
from tests.support.process_group import Launch
from tests.swarm.support.swarm_harness import WITNESS, open_swarm

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


HOME_PORT = 4002


def merges(peer: PeerProcess, since: int) -> int:
    """Return how many slices a peer owned in its last exchange after that place in its facts; -1 without one."""
    owned = [fact.fields["owned"] for fact in peer.facts[since:] if fact.fields.get("phase") == "exchange"]
    return int(owned[-1]) if owned else -1


async def test_a_peer_behind_a_nat_takes_part_as_a_client(lab_of: Callable[[bool], Lab], tmp_path: Path) -> None:
    """It dials the others, none dials it, its updates are merged, and it merges nothing until its port is forwarded."""
    lab = lab_of(False)
    ports = iter(range(4001, 4010))

    def launch(name: str) -> Launch:
        if name == "home":
            return Launch(f"/ip4/0.0.0.0/tcp/{HOME_PORT}", lab.namespace("home-a"))
        return Launch(f"/ip4/{PUBLIC_IP}/tcp/{next(ports)}", lab.namespace("public"))

    run = WITNESS.replace("hidden_size = 32", "hidden_size = 128")  # so that there are slices for all
    async with open_swarm(tmp_path, launch=launch, run=run) as swarm:
        a, b, home = (swarm.join(name) for name in ("a", "b", "home"))
        await home.wait_for("client_mode")
        lab.count_dials("a")
        await home.wait_for("round_committed", lambda fields: fields["members"] == 3 == fields["contributions"])
        start = [peer.mark() for peer in (a, b, home)]
        await swarm.committed(home.round + 3)
        assert merges(home, start[2]) == 0 < min(merges(a, start[0]), merges(b, start[1]))
        assert home.commits[-1].fields["contributions"] == 3, "its update is merged"
        assert lab.dials() == 0, "its address behind the NAT was dialled"

        lab.forward("a", HOME_PORT)
        since = home.mark()
        await home.wait_for("client_mode_ended", since=since)
        since = home.mark()
        await swarm.committed(home.round + 2)
        assert merges(home, since) > 0, "it owns slices again two rounds later"
