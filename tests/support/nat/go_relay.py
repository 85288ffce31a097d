"""The relay of go-libp2p, which ours and its clients are held against: hivemind's daemon in a process of its own.

    async with open_go_relay() as relay:
        print(relay.address)

hivemind itself is never imported: it cannot share a process with py-libp2p. Its wheel, which holds the daemon, exists
for Linux on x86-64 only.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from peer.events import EventLog
from peer.files import temporary_folder
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes import abort_connection
from peer.net.nat import circuit_relay as circuit
from tests.support.forking.server import die_with_parent

_START_S: Final = 60.0  # it may share the machine with other tests
_STARTS_MAX: Final = 24
_CIRCUIT_BYTES: Final = 1 << 44
_LIMITS: Final = ("-relayTimeLimit", "24h", "-relayDataLimit", str(_CIRCUIT_BYTES), "-relayMaxCircuits", "128")


@dataclass(frozen=True)
class GoRelay:
    """A running daemon."""

    process: subprocess.Popen[str]
    peer_id: str
    address: str
    """A full multiaddr, in the form of `--relay`."""


def find_daemon() -> Path | None:
    """Return the daemon's binary in the installed hivemind, None if there is none."""
    spec = importlib.util.find_spec("hivemind")  # does not import it
    if spec is None or spec.origin is None:
        return None
    daemon = Path(spec.origin).parent / "hivemind_cli" / "p2pd"
    return daemon if os.access(daemon, os.X_OK) else None


@asynccontextmanager
async def open_go_relay() -> AsyncIterator[GoRelay]:
    """Run a relay at a free port of 127.0.0.1 inside the block.

    The daemon starts two relay services, one with the limits of its options and one with go-libp2p's (2 minutes and 128
    KiB a circuit). A race within it decides which one answers; on one processor it is the former. We ask for a
    reservation, and start the daemon again if it is the other.
    """
    daemon = find_daemon()
    assert daemon is not None, "hivemind's daemon is not installed"
    identity = Identity.generate()
    with temporary_folder("go-relay-") as folder:
        key = folder / "key"
        key.write_bytes(_go_private_key(identity))
        command = [str(daemon), "-id", str(key), "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]
        command += ["-forceReachabilityPublic", "-relayService=1", *_LIMITS, "-listen"]
        async with open_host(identity=Identity.generate(), events=EventLog(), bulk_port=None) as asking:
            for start in range(_STARTS_MAX):
                process = subprocess.Popen(
                    [*command, f"/unix{folder}/control-{start}"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, "GOMAXPROCS": "1"},
                    preexec_fn=die_with_parent,
                )
                try:
                    relay = GoRelay(process, identity.peer_id, await _address_of(process, identity.peer_id))
                    if await _circuit_bytes(relay, asking) == _CIRCUIT_BYTES:
                        yield relay
                        return
                finally:
                    process.kill()
                    with process:
                        pass
    raise AssertionError("the daemon insists on its own limits")


async def _address_of(process: subprocess.Popen[str], peer_id: str) -> str:
    assert process.stdout is not None
    said: list[str] = []
    with trio.fail_after(_START_S):
        while not (said and said[-1].startswith("/ip4/")):
            line = await trio.to_thread.run_sync(process.stdout.readline)
            assert line, f"the daemon ended: {said}"
            said.append(line.strip())
    return f"{said[-1]}/p2p/{peer_id}"


async def _circuit_bytes(relay: GoRelay, asking: Host) -> int:
    """Return what a circuit may carry at the relay."""
    peer_id = ID.from_base58(relay.peer_id)
    with trio.fail_after(_START_S):
        address = Multiaddr(relay.address.partition("/p2p/")[0])
        connection = await asking.libp2p.get_network().dial_addr(address, peer_id)
        granted = await circuit.reserve(asking.libp2p, peer_id)
        await abort_connection(connection)
    return granted.circuit_bytes


def _go_private_key(identity: Identity) -> bytes:
    """Encode the identity for go-libp2p: protobuf {type: Ed25519, data: 32 bytes of seed, 32 of public key}."""
    data = identity.seed + identity.public_key
    return bytes([0x08, 0x01, 0x12, len(data)]) + data
