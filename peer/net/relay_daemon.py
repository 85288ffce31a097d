"""A public relay: hivemind's Go libp2p daemon in a process of its own.

    async with open_relay(RelayConfig(identity, listen=("/ip4/0.0.0.0/tcp/4001",))) as relay:
        print(relay.addresses)
        await relay.wait()

hivemind itself is never imported: it cannot share a process with py-libp2p. Its wheel, which holds the daemon, exists
for Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from peer.errors import ConfigError, ResourceError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, HostConfig, open_host
from peer.net.libp2p_fixes import abort_connection
from peer.net.nat import circuit_relay as circuit
from peer.temp_folder import temporary_folder

_START_S: Final = 15.0
_MORE_ADDRESSES_S: Final = 0.3
_STOP_S: Final = 3.0
_STARTS_MAX: Final = 24
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)  # loaded before the fork: nothing may be loaded between fork and exec

# A relayed connection may be a peer's only link to its round, so the limits are generous. A peer has several of them.
_CIRCUIT_BYTES: Final = 1 << 44
_LIMITS: Final = ("-relayTimeLimit", "24h", "-relayDataLimit", str(_CIRCUIT_BYTES), "-relayMaxCircuits", "128")
_CONNECTIONS: Final = ("-connManager", "-connLo", "1024", "-connHi", "2048", "-connGrace", "1m")


@dataclass(frozen=True)
class RelayConfig:
    """What a relay needs to run."""

    identity: Identity
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/4001",)
    announce: tuple[str, ...] = ()
    """Addresses to announce in place of those derived from `listen`."""


class Relay:
    """A running relay. Made by `open_relay`."""

    def __init__(self, peer_id: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.peer_id: Final = peer_id
        self.pid: Final = process.pid
        self.addresses: tuple[str, ...] = ()
        """Full multiaddrs, in the form of `--relay`."""
        self._process = process
        self._output = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        self._lines = _Lines(self._output)
        self._said: deque[str] = deque(maxlen=20)
        self._ended = trio.Event()

    async def wait(self) -> None:
        """Wait until the daemon ends, then raise ResourceError with its last line of output."""
        await self._ended.wait()
        raise ResourceError(f"the relay daemon ended ({self._last_line()}): start it again")

    async def _hear_addresses(self) -> None:
        """Wait until the daemon has printed its addresses. Raises ResourceError if it does not."""
        found: list[str] = []
        with trio.move_on_after(_START_S):
            while (line := await self._lines.next()) != "Peer Addrs:":
                if line is None:
                    raise ResourceError(f"the relay cannot start ({self._last_line()}): choose another --listen")
                self._said.append(line)
            found.append(await self._lines.next() or "")
        with trio.move_on_after(_MORE_ADDRESSES_S):  # the daemon does not say how many there are
            while (line := await self._lines.next()) is not None:
                found.append(line)
        self.addresses = tuple(f"{line}/p2p/{self.peer_id}" for line in found if line.startswith("/"))
        if not self.addresses:
            raise ResourceError(f"the relay named no address ({self._last_line()}): choose another --listen")

    async def _hear_the_rest(self) -> None:
        while (line := await self._lines.next()) is not None:
            self._said.append(line)
        self._ended.set()

    async def _stop(self) -> None:
        """End the daemon; cannot be cancelled."""
        with trio.CancelScope(shield=True):
            self._process.terminate()
            try:
                await trio.to_thread.run_sync(self._process.wait, _STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await trio.to_thread.run_sync(self._process.wait)
            assert self._process.stdout is not None
            self._process.stdout.close()
            await self._output.aclose()

    def _last_line(self) -> str:
        return self._said[-1] if self._said else "it printed nothing"


@asynccontextmanager
async def open_relay(config: RelayConfig) -> AsyncIterator[Relay]:
    """Run a relay inside the block. It ends with this process, however that ends.

    Raises ConfigError for a bad address, ResourceError where the daemon is not installed or cannot start (port in use).
    """
    for address in (*config.listen, *config.announce):
        if not address.startswith(("/ip4/", "/ip6/", "/dns")) or "/tcp/" not in address:
            raise ConfigError(f"{address} is not a TCP address: use one like /ip4/0.0.0.0/tcp/4001")
    if config.announce and config.listen[0].endswith("/tcp/0"):
        raise ConfigError("--announce names a fixed port and --listen port 0: name the same port with --listen")
    daemon = find_daemon()
    failure: Exception | None = None
    # Mode 0700, and a short path for the socket. The daemon reads its key before it answers, so no key stays on disk.
    with temporary_folder("barnraise-relay-") as folder:
        relay = await _start_generous(daemon, config, folder)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay._hear_the_rest)
            try:
                yield relay
            except Exception as error:  # noqa: BLE001 - raised below, outside the nursery, which would wrap it
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        await relay._stop()
    if failure is not None:
        raise failure


async def _start_generous(daemon: Path, config: RelayConfig, folder: Path) -> Relay:
    """Start a daemon that grants circuits with our limits.

    The daemon starts two relay services, one with our limits and one with go-libp2p's (2 minutes and 128 KiB a
    circuit). A race within it decides which one answers. So we ask for a reservation, and start it again if it is the
    other.
    """
    granted = None
    async with open_host(HostConfig(identity=Identity.generate(), events=EventLog(), bulk_port=None)) as asking:
        for _ in range(_STARTS_MAX):
            relay = _spawn(daemon, config, folder)
            try:
                await relay._hear_addresses()
                granted = await _reservation_at(relay, config, asking)
            except BaseException:
                await relay._stop()
                raise
            if granted.circuit_bytes in (0, _CIRCUIT_BYTES):
                return relay
            await relay._stop()
    raise ResourceError(f"the relay daemon insists on its own limits ({granted}): start it again")


def _spawn(daemon: Path, config: RelayConfig, folder: Path) -> Relay:
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(_go_private_key(config.identity))
    # Not by trio.run_process: it forks in a short-lived thread, and the kernel would report that thread's death.
    process = subprocess.Popen(
        _command(daemon, config, key, folder / "control"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches us only, and we stop the daemon
        preexec_fn=_dies_with(os.getpid()),
    )
    return Relay(config.identity.peer_id, process)


async def _reservation_at(relay: Relay, config: RelayConfig, asking: Host) -> circuit.Reservation:
    """Return the reservation that the relay grants to the host `asking`."""
    address = config.listen[0] if config.announce else relay.addresses[0].removesuffix(f"/p2p/{relay.peer_id}")
    address = address.replace("/0.0.0.0/", "/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")
    peer_id = ID.from_base58(relay.peer_id)
    try:
        with trio.fail_after(_START_S):
            connection = await asking.libp2p.get_network().dial_addr(Multiaddr(address), peer_id)
            granted = await circuit.reserve(asking.libp2p, peer_id)
            await abort_connection(connection)
            return granted
    except (BaseLibp2pError, trio.TooSlowError) as error:
        raise ResourceError(f"the relay does not answer at {address}: choose another --listen") from error


def find_daemon() -> Path:
    """Return the daemon's binary in the installed hivemind. Raises ResourceError if there is none."""
    spec = importlib.util.find_spec("hivemind")  # does not import it
    if spec is not None and spec.origin is not None:
        daemon = Path(spec.origin).parent / "hivemind_cli" / "p2pd"
        if os.access(daemon, os.X_OK):
            return daemon
    raise ResourceError(
        "the relay runs hivemind's daemon, which is not installed: on Linux x86-64 run `make setup`,"
        " or `pip install -e '.[relay]'` in the repository"
    )


def _command(daemon: Path, config: RelayConfig, key: Path, control: Path) -> list[str]:
    announce = ("-announceAddrs", ",".join(config.announce)) if config.announce else ()
    return [
        str(daemon),
        *("-id", str(key), "-listen", f"/unix{control}", "-hostAddrs", ",".join(config.listen)),
        *announce,
        *("-forceReachabilityPublic", "-relayService=1", *_LIMITS, *_CONNECTIONS),
    ]


def _go_private_key(identity: Identity) -> bytes:
    """Encode the identity for go-libp2p: protobuf {type: Ed25519, data: 32 bytes of seed, 32 of public key}."""
    data = identity.key_pair.private_key.to_bytes() + identity.key_pair.public_key.to_bytes()
    return bytes([0x08, 0x01, 0x12, len(data)]) + data


def _dies_with(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return in_child


class _Lines:
    """The lines of a stream. A cancelled `next` loses nothing."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._complete: deque[str] = deque()
        self._rest = b""

    async def next(self) -> str | None:
        """Return the next line, None at the end."""
        while not self._complete:
            data = await self._stream.receive_some()
            if not data:
                return None
            *complete, self._rest = (self._rest + data).split(b"\n")
            self._complete.extend(line.decode(errors="replace").strip() for line in complete)
        return self._complete.popleft()
