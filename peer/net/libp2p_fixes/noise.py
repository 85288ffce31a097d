"""A Noise transport without extra copies and messages. This is the only fix that is about speed alone.

Two processes on two cores over loopback, 1 MiB writes:

    stock 0.8.1        4.9 s/GB of CPU to send, 6.0 to receive     86 MB/s    echo of 100 bytes 0.93 ms
    `yamux` alone      2.2                      2.2
    both               1.5                      1.4               331 MB/s                      0.47 ms

Stock reads a length, then a body, each under two locks. It encrypts into new buffers, and splits every full Yamux frame
over two Noise messages, the second of 17 bytes. Here one system call reads many messages. A batch is encrypted into one
reused buffer and sent in one call. The bytes on the wire follow the same specification
(https://github.com/libp2p/specs/tree/master/noise).
"""

from __future__ import annotations

from typing import Any, Final

from cryptography.exceptions import InvalidTag
from libp2p.io.abc import EncryptedMsgReadWriter
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.security.noise import patterns

_MESSAGE_MAX: Final = 65535
_TAG: Final = 16
_PLAINTEXT_MAX: Final = _MESSAGE_MAX - _TAG
_PREFIX: Final = 2  # length of a message, big-endian
_READ_MIN: Final = 8 * 1024
_READ_MAX: Final = 512 * 1024


def apply() -> None:
    """Use this transport for every Noise session after its handshake."""
    patterns.NoiseTransportReadWriter = NoiseTransport  # type: ignore[attr-defined,assignment]


class NoiseTransport(EncryptedMsgReadWriter):
    """Encrypted messages over a raw connection, after the handshake. One task may write while another reads."""

    def __init__(self, conn: Any, noise_state: Any) -> None:
        super().__init__(conn)
        self._raw = conn
        states = noise_state.noise_protocol
        self._encryptor = states.cipher_state_encrypt.cipher.cipher  # cryptography's ChaCha20Poly1305
        self._decryptor = states.cipher_state_decrypt.cipher.cipher
        self._sent: int = states.cipher_state_encrypt.n  # the nonce is the count of messages
        self._received: int = states.cipher_state_decrypt.n
        self._out = bytearray(_PREFIX + _MESSAGE_MAX)
        self._in = memoryview(b"")
        self._read_size = _READ_MIN

    async def write_msg(self, msg: bytes | bytearray | memoryview) -> None:
        """Encrypt `msg` into as few messages as it takes and send them in one call."""
        plain = memoryview(msg)
        messages = max(1, -(-len(plain) // _PLAINTEXT_MAX))
        size = len(plain) + messages * (_PREFIX + _TAG)
        if len(self._out) < size:
            self._out = bytearray(size)
        out = memoryview(self._out)
        at = 0
        for start in range(0, max(1, len(plain)), _PLAINTEXT_MAX):
            part = plain[start : start + _PLAINTEXT_MAX]
            encrypted = len(part) + _TAG
            out[at : at + _PREFIX] = encrypted.to_bytes(_PREFIX, "big")
            at += _PREFIX
            self._encryptor.encrypt_into(_nonce(self._sent), part, None, out[at : at + encrypted])
            self._sent += 1
            at += encrypted
        await self._raw.write(out[:size])

    async def read_msg(self) -> bytes:
        """Return the next message's plaintext, b"" if the connection was closed between two messages."""
        while True:
            have = len(self._in)
            if have >= _PREFIX:
                end = _PREFIX + int.from_bytes(self._in[:_PREFIX], "big")
                if have >= end:
                    encrypted = self._in[_PREFIX:end]
                    self._in = self._in[end:]
                    return self.decrypt(encrypted)
            more = await self._raw.read(self._read_size)
            if not more:
                if have:
                    raise IncompleteReadError("the connection ended within a Noise message")
                return b""
            # Large reads for a busy connection, small ones for a quiet one.
            self._read_size = (
                min(_READ_MAX, 2 * self._read_size)
                if len(more) == self._read_size
                else max(_READ_MIN, self._read_size // 2)
            )
            self._in = memoryview(b"".join((self._in, more)) if have else more)

    def encrypt(self, data: bytes) -> bytes:
        encrypted: bytes = self._encryptor.encrypt(_nonce(self._sent), data, None)
        self._sent += 1
        return encrypted

    def decrypt(self, data: bytes | memoryview) -> bytes:
        try:
            plain: bytes = self._decryptor.decrypt(_nonce(self._received), data, None)
        except (InvalidTag, ValueError) as error:
            raise ConnectionClosedError("a Noise message fails its authentication") from error
        self._received += 1
        return plain

    async def close(self) -> None:
        await self._raw.close()


def _nonce(count: int) -> bytes:
    return b"\0\0\0\0" + count.to_bytes(8, "little")
