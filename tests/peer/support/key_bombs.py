"""Public keys that are RSA private keys, whose parsers take seconds, and a Noise handshake that shows one."""

from __future__ import annotations

from typing import Final

import trio
from libp2p.crypto.pb.crypto_pb2 import KeyType, PublicKey
from libp2p.security.noise.pb.noise_pb2 import NoiseHandshakePayload
from noise.connection import Keypair, NoiseConnection

_NEGOTIATION: Final = b"\x13/multistream/1.0.0\n\x07/noise\n"
_PRIME: Final = (1 << 11213) - 1  # of Mersenne: a primality test of it takes seconds


def _length(count: int) -> bytes:
    if count < 0x80:
        return bytes([count])
    encoded = count.to_bytes((count.bit_length() + 7) // 8, "big")
    return bytes([0x80 | len(encoded)]) + encoded


def _integer(value: int) -> bytes:
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "big")
    return b"\x02" + _length(len(encoded)) + encoded


def _rsa_private(n: int, d: int, p: int, q: int) -> bytes:
    body = b"".join(_integer(value) for value in (0, n, 65537, d, p, q, 1, 1, 1))
    return PublicKey(key_type=KeyType.RSA, data=b"\x30" + _length(len(body)) + body).SerializeToString()


def prime_bomb() -> bytes:
    """Return 4 kB that cost a test of a prime number of 11213 bits."""
    return _rsa_private(3 * _PRIME, 65537, _PRIME, 3)


def inverse_bomb(size: int) -> bytes:
    """Return `size` bytes that cost the inverse of one huge number modulo another."""
    bits = (size - 100) * 4
    p, q = (pow(3, 3 * bits, 1 << bits) | 1 << bits - 1), (pow(5, 3 * bits, 1 << bits) | 1 << bits - 1)
    return _rsa_private(15, 5, p, q)


async def handshake(port: int, identity_key: bytes) -> None:
    """Show a listener a key in the last message of a Noise handshake, and wait until it hangs up."""
    noise = NoiseConnection.from_name(b"Noise_XX_25519_ChaChaPoly_SHA256")
    noise.set_keypair_from_private_bytes(Keypair.STATIC, bytes([7] * 32))
    noise.set_as_initiator()
    noise.start_handshake()
    async with await trio.open_tcp_stream("127.0.0.1", port) as sock:

        async def receive(count: int) -> bytes:
            got = b""
            while len(got) < count:
                more = await sock.receive_some(count - len(got))
                assert more, "the listener hung up before the key was shown"
                got += more
            return got

        async def send(message: bytes) -> None:
            await sock.send_all(len(message).to_bytes(2, "big") + message)

        await sock.send_all(_NEGOTIATION)
        assert await receive(len(_NEGOTIATION)) == _NEGOTIATION
        await send(noise.write_message())
        noise.read_message(await receive(int.from_bytes(await receive(2), "big")))
        payload = NoiseHandshakePayload(identity_key=identity_key, identity_sig=bytes(64)).SerializeToString()
        await send(noise.write_message(payload))
        with trio.fail_after(300):
            try:
                while await sock.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass
