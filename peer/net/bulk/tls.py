"""A TLS 1.3 socket for trio that reads and writes the caller's buffers directly, and the certificate of one host.

trio's SSLStream passes every byte through two extra buffers in 16 KiB steps. Here OpenSSL works on the socket itself,
so a payload is decrypted straight into its final buffer.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from peer.errors import ConnectionLost

_WRITE_BYTES: Final = 1 << 16  # four TLS records; OpenSSL reports a write only when all of it is done
_TURN_BYTES: Final = 1 << 20  # decrypted at most before other tasks may run
_UNSENT_BYTES: Final = 1 << 19  # waits in the kernel at most, so that data written is nearly sent
_WAKE_BYTES: Final = 1 << 17  # of a payload arrive before its reader is woken; a slow link delivers 10 KB at a time
_WAKE_S: Final = 0.5  # the reader is woken then in any case: every byte is a sign of life
_RECORD_BYTES: Final = 1 << 14  # one TLS record, of which OpenSSL may hold a part
_MAX_PACING_RATE: Final = 47  # SO_MAX_PACING_RATE and fields of tcp_info, of Linux, for which Python has no names
_UNPACED: Final = (1 << 32) - 1
_INFO_BYTES: Final = 128
_BYTES_ACKED: Final = struct.Struct("=120xQ")
_ENDED: Final = (ssl.SSLError, OSError, trio.ClosedResourceError)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for one process. Peers learn its hash over libp2p, which has authenticated us."""

    context: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def generate(cls) -> Certificate:
        """Make a new key and certificate (about a millisecond)."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "barnraise")])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=3650))
            .sign(key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # the ssl module reads keys from files only; mode 0600
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name)
        der = certificate.public_bytes(serialization.Encoding.DER)
        return cls(context, hashlib.sha256(der).digest())


def client_context() -> ssl.SSLContext:
    """Return a TLS 1.3 context without authorities: the caller checks `TlsSocket.peer_fingerprint`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class TlsSocket:
    """One TLS connection. At most one task reads and one writes; both may be cancelled.

    Every method raises ConnectionLost when the connection has ended."""

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext, *, server_side: bool) -> None:
        raw = socket.socket(fileno=os.dup(stream.socket.fileno()))
        raw.setblocking(False)
        stream.socket.close()  # the duplicate lives on
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._socket = context.wrap_socket(raw, server_side=server_side, do_handshake_on_connect=False)
        # `recv_into` is this and six more calls in Python for each record: 4 percent of a round's processor time
        self._read: Callable[[int, memoryview], int] = self._socket.read  # type: ignore[assignment]
        self._closed = False
        self._wake_bytes = 1
        self._drained = False
        """Whether the last read has taken all that had come."""

    async def handshake(self, turn: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint) -> None:
        """Agree on keys. `turn` is awaited before each step."""
        while True:
            await turn()
            try:
                self._socket.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._readable()
            except ssl.SSLWantWriteError:
                await self._writable()
            except _ENDED as error:
                raise ConnectionLost(f"the TLS handshake failed: {error}") from error

    @property
    def peer_fingerprint(self) -> bytes:
        """SHA-256 of the other side's certificate."""
        return hashlib.sha256(self._socket.getpeercert(binary_form=True) or b"").digest()

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Write everything. After a cancellation only `close` may follow."""
        view = memoryview(data).cast("B")
        while view:
            view = view[await self.send_some(view) :]
        await trio.lowlevel.checkpoint()

    def send_now(self, view: memoryview) -> int:
        """Write the beginning of `view` without waiting and return the count; 0 if that is not possible now, or nothing
        is to be written. After 0 the next write must begin with the same bytes."""
        try:
            return self._socket.send(view[:_WRITE_BYTES]) if view else 0
        except ssl.SSLWantWriteError:
            return 0
        except _ENDED as error:
            raise ConnectionLost("the connection ended while sending") from error

    async def send_some(self, view: memoryview) -> int:
        """Write the beginning of `view` and return the count.

        After a cancellation or an error the next call must write the same bytes, from any buffer."""
        while True:
            try:
                return self._socket.send(view[:_WRITE_BYTES])
            except ssl.SSLWantWriteError:
                await self._writable()
            except ssl.SSLWantReadError as error:  # a change of keys, which no honest peer asks for
                raise ConnectionLost("the other side asked for a new handshake") from error
            except _ENDED as error:
                raise ConnectionLost("the connection ended while sending") from error

    async def receive_into(self, view: memoryview, expected: int = 1) -> int:
        """Fill `view` from the front with what has arrived, at least one byte, and return the count.

        May wait a moment for more bytes if `expected` says that many are on their way."""
        view = view[:_TURN_BYTES]
        many = min(_WAKE_BYTES, expected - 2 * _RECORD_BYTES)
        if self._drained and many <= 1:  # as a rule between messages: nothing is here, so wait at once
            self._wake_at(1)
            await self._readable()
        else:
            await trio.lowlevel.checkpoint()
        while True:
            count = self._receive_now(view)
            if count:
                return count
            if many > 1:
                self._wake_at(many)
                with trio.move_on_after(_WAKE_S):
                    await self._readable()
                    continue
            self._wake_at(1)
            await self._readable()

    def acked_bytes(self) -> int:
        """Return the bytes that the other side's kernel has, of those sent; 0 where the system does not report it."""
        if sys.platform != "linux" or self._closed:
            return 0
        with suppress(OSError, struct.error):  # a kernel before 4.1 tells less
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            return int(_BYTES_ACKED.unpack(info)[0])
        return 0

    def pace(self, bytes_per_s: float) -> None:
        """Send at most so fast, infinity for as fast as possible; does nothing where the system cannot."""
        if sys.platform == "linux" and not self._closed:
            with suppress(OSError):
                rate = struct.pack("=I", int(min(bytes_per_s, _UNPACED)))
                self._socket.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)

    def close(self) -> None:
        """End the connection now; pending reads and writes fail."""
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._socket.fileno())
            self._socket.close()

    def _receive_now(self, view: memoryview) -> int:
        if self._closed:
            raise ConnectionLost("the connection was closed")
        count, size, self._drained = 0, len(view), False
        while count < size:
            try:
                got = self._read(size - count, view[count:])
            except ssl.SSLWantReadError:
                self._drained = True
                break
            except _ENDED as error:
                if count:
                    break  # return what arrived before the end
                raise ConnectionLost("the connection ended while receiving") from error
            if not got:
                if count:
                    break
                raise ConnectionLost("the connection ended while receiving")
            count += got
        return count

    def _wake_at(self, size_bytes: int) -> None:
        if size_bytes != self._wake_bytes:
            self._wake_bytes = size_bytes
            with suppress(OSError):  # a system without this option wakes us for every byte
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    async def _readable(self) -> None:
        await self._wait(trio.lowlevel.wait_readable)

    async def _writable(self) -> None:
        await self._wait(trio.lowlevel.wait_writable)

    async def _wait(self, ready: Callable[[int], Awaitable[None]]) -> None:
        if self._closed:
            raise ConnectionLost("the connection was closed")
        try:
            await ready(self._socket.fileno())
        except (*_ENDED, trio.BusyResourceError) as error:  # busy: a key change that no honest peer asks for
            raise ConnectionLost("the connection was closed") from error
