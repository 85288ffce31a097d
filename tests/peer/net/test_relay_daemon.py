"""The relay daemon and circuits through it (hole 11). Real NATs are in `tests/processes/test_nat.py`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from peer.errors import ConfigError, DialError, ResourceError
from peer.events import EventLog
from peer.identity import Identity
from peer.net import relay_daemon
from peer.net.host import Host, HostConfig, open_host
from peer.net.method import Call, Method
from peer.net.nat.reachability import probe
from peer.net.relay_daemon import Relay, RelayConfig, find_daemon, open_relay

_ROOT = Path(__file__).parents[3]
# A relay gets a minute to start: its Go daemon shares the machine with other tests.
START_S = 60.0
_CLI = f"from peer.net import relay_daemon; relay_daemon._START_S = {START_S}; from cli.main import main; main()"

pytestmark = pytest.mark.process


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_daemon, "_START_S", START_S)
    try:
        find_daemon()
    except ResourceError as reason:
        pytest.skip(str(reason))


class Note(msgspec.Struct, frozen=True):
    text: str


ECHO: Method[Note, Note] = Method("test/echo", Note, Note)


async def _echo(call: Call[Note]) -> Note:
    return call.body


@asynccontextmanager
async def a_host(*relays: str) -> AsyncIterator[Host]:
    config = HostConfig(identity=Identity.generate(), events=EventLog(), relays=relays)
    placed = trio.Event()
    async with open_host(config) as host:
        host.rpc.register(ECHO, _echo)
        host.traversal.changed = placed.set
        with trio.fail_after(60):
            while relays and not host.traversal.addresses:
                await placed.wait()
        yield host


def _circuits(host: Host) -> list[str]:
    return [address for address in host.addresses if "/p2p-circuit/" in address]


async def test_hole_11_a_peer_is_reached_by_its_circuit_address(daemon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.nat.traversal._DIAL_BACK_S", 60.0)  # before it punches a hole instead
    config = RelayConfig(Identity.generate(), ("/ip4/127.0.0.1/tcp/0",))
    async with open_relay(config) as relay, a_host(relay.addresses[0]) as hidden, a_host() as caller:
        peer_id = ID.from_base58(hidden.peer_id)
        circuits = _circuits(hidden)
        assert circuits == [f"{relay.addresses[0]}/p2p-circuit/p2p/{hidden.peer_id}"]
        with pytest.raises(BaseLibp2pError):  # the library cannot dial such an address
            await caller.libp2p.connect(PeerInfo(peer_id, [Multiaddr(circuits[0])]))

        caller.book.add(hidden.peer_id, circuits)
        reply = await caller.rpc.call(hidden.peer_id, ECHO, Note("through the relay"), timeout_s=60)
        assert reply.body == Note("through the relay")
        assert relay.peer_id not in caller.connected
        found = await probe(caller, hidden.peer_id, timeout_s=60)
        assert found.kind == "public"  # no NAT here, so it dials back


async def test_a_peer_that_left_its_relay_is_told_apart_from_a_dead_relay(daemon: None) -> None:
    async with a_host() as caller:
        async with open_relay(RelayConfig(Identity.generate(), ("/ip4/127.0.0.1/tcp/0",))) as relay:
            async with a_host(relay.addresses[0]) as hidden:
                circuits = _circuits(hidden)
            with trio.fail_after(60):
                answer = "the relay cannot reach it"
                while "the relay cannot reach it" in answer:  # it has not noticed yet that the peer is gone
                    with pytest.raises(DialError) as caught:
                        await caller.connect_address(circuits[0], timeout_s=60)
                    answer = str(caught.value)
            assert "no reservation there any more" in answer
        with pytest.raises(DialError):
            await caller.connect_address(circuits[0], timeout_s=60)


async def test_the_daemon_may_print_its_first_address_late(autojump_clock: trio.testing.MockClock) -> None:
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        relay = Relay("its-id", process)
        await relay._output.aclose()
        says, relay._lines._stream = trio.testing.memory_stream_one_way_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay._hear_addresses)
            for pause_s, line in ((5.0, "Peer Addrs:"), (5.0, "/ip4/192.0.2.1/tcp/1"), (0.1, "/ip6/::1/tcp/1")):
                await trio.sleep(pause_s)
                await says.send_all(f"{line}\n".encode())
    assert relay.addresses == ("/ip4/192.0.2.1/tcp/1/p2p/its-id", "/ip6/::1/tcp/1/p2p/its-id")


async def test_bad_addresses_and_a_missing_daemon_are_user_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (
        RelayConfig(Identity.generate(), ("/ip4/0.0.0.0/udp/4001",)),
        RelayConfig(Identity.generate(), ("/ip4/0.0.0.0/tcp/0",), ("/ip4/203.0.113.7/tcp/4001",)),
    ):
        monkeypatch.setattr("peer.net.relay_daemon.find_daemon", lambda: Path("/nonexistent"))
        with pytest.raises(ConfigError):
            async with open_relay(config):
                pass
    monkeypatch.undo()
    monkeypatch.setattr("peer.net.relay_daemon.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"pip install -e '\.\[relay\]'"):
        find_daemon()


def _start(home: Path) -> tuple[subprocess.Popen[str], dict[str, object]]:
    command = [sys.executable, "-c", _CLI, "relay", "--json", "--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(home)]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        with process:
            process.kill()
        raise AssertionError("the relay has ended at once")
    return process, json.loads(line)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_daemon_ends_with_its_parent_and_keeps_its_name(daemon: None, tmp_path: Path) -> None:
    names = []
    for death in (signal.SIGKILL, signal.SIGTERM):
        process, told = _start(tmp_path)
        with process:
            (child,) = _children(process.pid)
            watch = os.pidfd_open(child)
            process.send_signal(death)
            process.wait(timeout=60)
        with os.fdopen(watch) as ended:
            assert _readable(ended.fileno(), 60.0), "the daemon outlived its parent"
        names.append(told["peer"])
    assert names[0] == names[1]


def _readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])
