"""Records: what may be stored, which peer may store it, for how long, and how each claim is checked.

A record is a msgpack value under (namespace, schema, key), with the signer's peer id as its subkey. It travels as a
`peer.identity.Signed` body, and every store and every reader runs the same checks, in order of cost:

    size -> signature -> namespace, schema -> key, signer rule -> time to live -> type of the value -> `check` -> clock

A refusal is one of these:

    RecordError (BarnraiseError)
    ├── OversizeRecord    also a ProtocolViolation: larger than its schema allows
    ├── ForgedRecord      also a ProtocolViolation: the signature does not fit, or the body does not decode
    ├── WrongSchema       also a ProtocolViolation: another namespace, or a value of another type
    ├── UnknownSchema     no kind of record that this version knows: a later one may
    ├── WrongKey          also a ProtocolViolation: no key that the run reads
    ├── WrongSigner       also a ProtocolViolation: this signer may not write this key, or another peer delivered it
    ├── ExpiredRecord     its time to live is over, or the writer's clock is slow
    ├── FutureRecord      the writer's clock is fast
    ├── StaleRecord       a newer record of the same signer is held: .newest_us
    ├── StoreFull         the store, the key or the signer is at its limit
    └── UnvouchedRecord   `Schema.check` does not believe its signer: it is no member of the run, or not any more
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from dht.key import record_key
from peer.decoding import MALFORMED, told
from peer.errors import BarnraiseError, ProtocolViolation
from peer.identity import Identity, Signed, open_body, sign_body

T = TypeVar("T")

KIND: Final = "dht-record"
CLOCK_TOLERANCE_S: Final = 10.0
KEY_CHARS_MAX: Final = 256
ENVELOPE_BYTES_MAX: Final = 1024  # a signed record without its value: names, times, signer, signature
SIGNED_BYTES_MAX: Final = 64 << 10  # of a record of any version

Text = Annotated[str, msgspec.Meta(max_length=4 * KEY_CHARS_MAX)]  # the checks below say more

_encoder: Final = msgspec.msgpack.Encoder()


class RecordError(BarnraiseError):
    """A record was not accepted."""

    exit_code = 3


class OversizeRecord(RecordError, ProtocolViolation):
    pass


class ForgedRecord(RecordError, ProtocolViolation):
    pass


class WrongSchema(RecordError, ProtocolViolation):
    pass


class UnknownSchema(RecordError):
    pass


class WrongKey(RecordError, ProtocolViolation):
    pass


class WrongSigner(RecordError, ProtocolViolation):
    pass


class ExpiredRecord(RecordError):
    pass


class FutureRecord(RecordError):
    pass


class StaleRecord(RecordError):
    """A newer record of the same signer is held, issued at `newest_us`."""

    def __init__(self, message: str, newest_us: int) -> None:
        super().__init__(message)
        self.newest_us = newest_us


class StoreFull(RecordError):
    pass


class UnvouchedRecord(RecordError):
    pass


@dataclass(frozen=True)
class Schema(Generic[T]):
    """One kind of record."""

    name: str
    type: type[T]
    """The type of a value, which travels as msgpack. A struct should bound its strings and lists by `msgspec.Meta`."""
    ttl_max_s: float
    size_max: int
    """Bytes of an encoded value."""
    signer: Callable[[str, str], bool]
    """Says of (key, peer id) whether that peer may write that key."""
    keys: Callable[[str, str], bool] = lambda namespace, key: True
    """Says of (namespace, key) whether the run reads that key: no other is kept."""
    check: Callable[[str, T], None] | None = None
    """Raises a RecordError if (peer id, value) is not to be believed, for instance without that peer's credential."""
    scarce: bool = False
    """Whether identities that pass `check` are scarce: then their records need not share the room of strangers."""

    def encode(self, value: T) -> bytes:
        """Return the bytes of a value. Raises OversizeRecord."""
        encoded = _encoder.encode(value)
        if len(encoded) > self.size_max:
            raise OversizeRecord(
                f"a {self.name!r} record of {len(encoded)} bytes is over its cap of {self.size_max}: publish less"
            )
        return encoded

    def decode(self, encoded: bytes) -> T:
        """Return the value of some bytes. Raises OversizeRecord or WrongSchema."""
        if len(encoded) > self.size_max:
            raise OversizeRecord(f"a {self.name!r} record of {len(encoded)} bytes is over its cap of {self.size_max}")
        try:
            return msgspec.msgpack.decode(encoded, type=self.type)
        except MALFORMED as error:
            raise WrongSchema(f"a value is not of schema {self.name!r}: {told(error)}") from error


@dataclass(frozen=True)
class RecordEntry(Generic[T]):
    """One signer's value under a key, as a reader gets it."""

    peer: str
    """The signer."""
    value: T
    expires_at: float
    """Unix time by this machine's clock."""


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The signed part of a record."""

    namespace: Text
    schema: Text
    key: Text
    value: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    issued_us: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    """Unix time in microseconds by the writer's clock. It orders the records of a signer."""
    ttl_ms: Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]


@dataclass(frozen=True)
class Record:
    """A record whose claims were checked, except for its age."""

    signed: Signed
    body: Body
    value: object
    digest: bytes
    """Its position: `record_key` of its namespace, schema and key."""

    @property
    def signer(self) -> str:
        return self.signed.signer

    @property
    def ttl_s(self) -> float:
        return self.body.ttl_ms / 1000

    @property
    def size_bytes(self) -> int:
        return signed_size(self.signed)


def signed_size(signed: Signed) -> int:
    """Return the bytes of a signed record without its framing."""
    return len(signed.body) + len(signed.signer) + len(signed.signature)


def sign_record(
    identity: Identity, namespace: str, schema: Schema[T], key: str, value: T, *, ttl_s: float, issued_us: int
) -> Signed:
    """Sign a value for publication. Raises the error with which every store would refuse it."""
    if not 0 < ttl_s <= schema.ttl_max_s:
        raise WrongSchema(f"a {schema.name!r} record may live at most {schema.ttl_max_s:g} s, not {ttl_s:g}")
    if len(key) > KEY_CHARS_MAX:
        raise OversizeRecord(f"a key of {len(key)} characters is over the cap of {KEY_CHARS_MAX}: shorten it")
    if not schema.keys(namespace, key):
        raise WrongKey(f"no peer of this run reads {schema.name!r} records under {key!r}: publish under its own key")
    if not schema.signer(key, identity.peer_id):
        raise WrongSigner(f"{identity.peer_id} may not write {schema.name!r} records under {key!r}")
    body = Body(namespace, schema.name, key, schema.encode(value), issued_us, round(ttl_s * 1000))
    return sign_body(identity, KIND, body)


def open_record(signed: Signed, namespace: str, schemas: Mapping[str, Schema[Any]]) -> Record:
    """Check a record except for its age. Raises UnknownSchema, another RecordError that is a ProtocolViolation too, or
    what `check` does."""
    size = signed_size(signed)
    if size > SIGNED_BYTES_MAX:
        raise OversizeRecord(f"a record of {size} bytes is over the cap of all records, {SIGNED_BYTES_MAX}")
    try:
        body = open_body(signed, KIND, Body)
    except ProtocolViolation as error:
        raise ForgedRecord(f"a record said to be of {signed.signer} is not: {error}") from error
    if body.namespace != namespace:
        raise WrongSchema(f"a record of namespace {body.namespace!r} came to {namespace!r}")
    schema = schemas.get(body.schema)
    if schema is None:
        raise UnknownSchema(f"this node knows no schema {body.schema[:64]!r}: upgrade barnraise to have it kept here")
    if size > ENVELOPE_BYTES_MAX + schema.size_max:
        raise OversizeRecord(f"a {schema.name!r} record of {size} bytes is over its cap")
    if len(body.key) > KEY_CHARS_MAX:
        raise OversizeRecord(f"a key of {len(body.key)} characters is over the cap of {KEY_CHARS_MAX}")
    if not schema.keys(namespace, body.key):
        raise WrongKey(f"no peer of this run reads {schema.name!r} records under {body.key!r}")
    if not schema.signer(body.key, signed.signer):
        raise WrongSigner(f"{signed.signer} may not write {schema.name!r} records under {body.key!r}")
    if not 0 < body.ttl_ms <= schema.ttl_max_s * 1000:
        raise WrongSchema(
            f"a {schema.name!r} record is to live {body.ttl_ms} ms, over the cap of {schema.ttl_max_s:g} s"
        )
    value = schema.decode(body.value)
    if schema.check is not None:
        schema.check(signed.signer, value)
    return Record(signed, body, value, record_key(namespace, body.schema, body.key))


def check_delivery(record: Record, now_s: float) -> None:
    """Check a record's age at a store. Raises ExpiredRecord or FutureRecord.

    Signers deliver a record right after signing, so the age must be near zero. The store then need not trust the
    writer's clock: it counts the time to live from the arrival, by its own monotonic clock.
    """
    age_s = now_s - record.body.issued_us / 1e6
    if age_s > CLOCK_TOLERANCE_S:
        raise ExpiredRecord(f"the record was signed {age_s:.1f} s ago by this clock: set the clock (NTP)")
    _check_not_future(age_s)


def check_age(record: Record, now_s: float) -> None:
    """Check a record's age at a reader: not from the future, not expired. Raises as `check_delivery`."""
    age_s = now_s - record.body.issued_us / 1e6
    if is_expired(record, now_s):
        raise ExpiredRecord(f"the record expired {age_s - record.ttl_s:.1f} s ago")
    _check_not_future(age_s)


def is_expired(record: Record, now_s: float) -> bool:
    """Return whether a reader whose clock shows `now_s` refuses a record as expired."""
    return now_s - record.body.issued_us / 1e6 > record.ttl_s + CLOCK_TOLERANCE_S


def _check_not_future(age_s: float) -> None:
    if age_s < -CLOCK_TOLERANCE_S:
        raise FutureRecord(f"the record was signed {-age_s:.1f} s in the future by this clock: set the clock (NTP)")
