"""`peer relay`: what it prints, from its start to its end."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from cli.commands.relay import _print_status
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.nat.circuit_relay import reserve
from peer.net.relay.circuit import RelayCounts
from peer.net.relay.ledger import RelayLimits
from tests.support.forking.forked import ForkedProcess

ROOT = Path(__file__).parents[3]


@pytest.mark.process
def test_a_relay_says_where_it_is_and_what_it_does(tmp_path: Path) -> None:
    words = ("relay", "--json", "--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(tmp_path), "--circuit-hours", "2")
    names = []
    for _ in range(2):
        pipe = subprocess.PIPE
        with ForkedProcess("cli.main", *words, "--status-every", "0.1", stdout=pipe, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            names.append(told["peer"])
            assert json.loads(process.stdout.readline()) == _idle()
            assert trio.run(_circuit_hours, told["addresses"][0]) == 2
            process.send_signal(signal.SIGTERM)
            process.wait()
    assert names[0] == names[1]


def _idle() -> dict[str, int]:
    return {"reservations": 0, "circuits": 0, "bytes_relayed": 0, "refused": 0}


async def _circuit_hours(address: str) -> float:
    bare, _, relay = address.partition("/p2p/")
    async with open_host(identity=Identity.generate(), events=EventLog(), bulk_port=None) as host:
        await host.libp2p.get_network().dial_addr(Multiaddr(bare), ID.from_base58(relay))
        return (await reserve(host.libp2p, ID.from_base58(relay))).circuit_s / 3600


def test_the_status_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _print_status(RelayCounts(3, 1, 1_500_000, 4), RelayLimits(), as_json=False)
    shown = "3 reservations of 512, 1 circuit of 1024, 1.5 MB relayed, 4 requests refused\n"
    assert capsys.readouterr().out == shown
