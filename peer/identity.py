"""A peer's identity: an Ed25519 key in a 0600 file, and the signatures made with it.

A peer id is the multihash of its public key ("12D3Koo..."), so the id is enough to check a signature.
Every signature covers the protocol version and a kind, so that bytes signed for one purpose never pass for another.

Ids, keys and signatures are libp2p's, made without it: importing it takes longer than most commands run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from peer.base58 import from_base58, to_base58
from peer.decoding import MALFORMED, decoder_of, told
from peer.errors import IdentityError, ProtocolViolation
from peer.files import create_private

_SEED_BYTES = 32
_SIGNATURE_BYTES = 64
_PEER_ID_CHARS = 52  # in base58, the same for all Ed25519 keys
_DOMAIN = b"barnraise/1/"
MULTIHASH_PREFIX = bytes.fromhex("002408011220")  # before an Ed25519 key in libp2p's protobuf, in its one encoding

Body = TypeVar("Body", bound=msgspec.Struct)


class Signed(msgspec.Struct, frozen=True):
    """A msgpack body with its signer's peer id and Ed25519 signature (64 bytes). Make with `sign_body`."""

    body: Annotated[bytes, msgspec.Meta(max_length=64 << 20)]
    signer: Annotated[str, msgspec.Meta(max_length=128)]
    signature: Annotated[bytes, msgspec.Meta(max_length=_SIGNATURE_BYTES)]


decoder_of(Signed)  # threads decode it by its type


@dataclass(frozen=True)
class Identity:
    """One peer's key, usually from `Identity.load_or_create(path)`."""

    seed: bytes = field(repr=False)
    """The private key, 32 bytes."""

    def __post_init__(self) -> None:
        """Raises ValueError for a key of another length."""
        if len(self.seed) != _SEED_BYTES:
            raise ValueError(f"a private key has {_SEED_BYTES} bytes, not {len(self.seed)}")

    @classmethod
    def generate(cls) -> Identity:
        """Return a new identity that exists in memory only."""
        return cls(bytes(SigningKey.generate()))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the 32-byte seed at `path`, or create one there (mode 0600). Raises IdentityError."""
        try:
            return cls._load(path)
        except (FileNotFoundError, NotADirectoryError):
            return cls._create(path)
        except OSError as error:
            raise IdentityError(f"cannot read the key {path} ({error.strerror}): check who owns it") from error

    @cached_property
    def _key(self) -> SigningKey:
        return SigningKey(self.seed)

    @property
    def public_key(self) -> bytes:
        """The public key, 32 bytes."""
        return bytes(self._key.verify_key)

    @cached_property
    def peer_id(self) -> str:
        return peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature (64 bytes) of `message`."""
        return self._key.sign(message).signature

    @classmethod
    def _load(cls, path: Path) -> Identity:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise IdentityError(f"the key {path} can be read by others on this machine: run `chmod 600 {path}`")
        seed = path.read_bytes()
        if len(seed) != _SEED_BYTES:
            raise IdentityError(
                f"the key {path} is damaged ({len(seed)} bytes instead of {_SEED_BYTES}): restore it from a backup,"
                " or delete it to join as a new peer"
            )
        return cls(seed)

    @classmethod
    def _create(cls, path: Path) -> Identity:
        return cls.generate().saved(path)

    def saved(self, path: Path) -> Identity:
        """Write the key to `path` (mode 0600), and return the identity that is kept there: the one before, if there was
        one. Raises IdentityError."""
        try:
            create_private(path, self.seed)
        except FileExistsError:
            return self._load(path)
        except OSError as error:
            raise IdentityError(
                f"cannot write the key {path} ({error.strerror}): choose a writable folder with --home"
            ) from error
        return self


def _public_key(peer_id: str) -> VerifyKey | None:
    """Return the Ed25519 key inside a peer id, or None if there is none."""
    if len(peer_id) != _PEER_ID_CHARS:  # before it is decoded or kept: decoding is quadratic in its length
        return None
    return _decoded_key(peer_id)


@lru_cache(maxsize=4096)
def _decoded_key(peer_id: str) -> VerifyKey | None:
    try:
        multihash = from_base58(peer_id)
        return VerifyKey(multihash[6:]) if multihash[:6] == MULTIHASH_PREFIX else None
    except ValueError:
        return None


def public_key_of(peer_id: str) -> bytes:
    """Return the 32 bytes of the public key inside a peer id. Raises ValueError if there is none."""
    key = _public_key(peer_id)
    if key is None:
        raise ValueError(f"{peer_id[:64]!r} is not the id of an Ed25519 peer")
    return bytes(key)


def peer_id_of(public_key: bytes) -> str:
    """Return the peer id of a public key of 32 bytes."""
    return to_base58(MULTIHASH_PREFIX + public_key)


def is_peer_id(text: str) -> bool:
    """Whether `text` is the base58 id of an Ed25519 peer."""
    return _public_key(text) is not None


def verify_signature(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is that peer's over `message`; False for anything malformed."""
    if len(signature) != _SIGNATURE_BYTES:
        return False
    key = _public_key(peer_id)
    try:
        return key is not None and key.verify(message, signature) == message
    except BadSignatureError:
        return False


def sign_body(identity: Identity, kind: str, body: msgspec.Struct) -> Signed:
    """Encode and sign `body` for the purpose `kind` (a fixed name such as "manifest")."""
    encoded = msgspec.msgpack.encode(body)
    return Signed(encoded, identity.peer_id, identity.sign(_signed_bytes(kind, encoded)))


def open_body(signed: Signed, kind: str, type_: type[Body], signer: str | None = None) -> Body:
    """Check and decode what `sign_body` made. Raises ProtocolViolation.

    `signer` demands a particular key: any valid signature is not the authority's.
    """
    if signer is not None and signed.signer != signer:
        raise ProtocolViolation(f"this {kind} is signed by {signed.signer}, not by {signer}")
    if not is_genuine(signed, kind):
        raise ProtocolViolation(f"the signature of this {kind} by {signed.signer} is wrong")
    return read_body(signed, kind, type_)


def is_genuine(signed: Signed, kind: str) -> bool:
    """Whether the signature is right for that purpose. It takes about 0.06 ms, and other threads run meanwhile."""
    return verify_signature(signed.signer, _signed_bytes(kind, signed.body), signed.signature)


def read_body(signed: Signed, kind: str, type_: type[Body]) -> Body:
    """Decode what was signed, where the signature is known to be right. Raises ProtocolViolation."""
    try:
        body: Body = decoder_of(type_).decode(signed.body)
    except MALFORMED as error:
        raise ProtocolViolation(f"this {kind} by {signed.signer} is malformed: {told(error)}") from error
    return body


def sign_bytes(identity: Identity, kind: str, encoded: bytes) -> bytes:
    """Return the signature (64 bytes) of `encoded` for the purpose `kind`, without a body around it."""
    return identity.sign(_signed_bytes(kind, encoded))


def verify_bytes(peer_id: str, kind: str, encoded: bytes, signature: bytes) -> bool:
    """Whether `sign_bytes` of that peer made the signature."""
    return verify_signature(peer_id, _signed_bytes(kind, encoded), signature)


def _signed_bytes(kind: str, encoded: bytes) -> bytes:
    return _DOMAIN + kind.encode() + b"\0" + encoded
