"""Records: what may be stored, by whom, for how long, and how each claim is checked.

A record is a msgpack value under (namespace, schema, key), with the signer's peer id as its subkey. It travels as a
`peer.identity.Signed` body, and every store and every reader runs the same checks, in order of cost:

    size -> signature -> namespace, schema -> signer rule -> time to live -> type of the value -> clock

A refusal is one of these:

    RecordError (BarnraiseError)
    ├── OversizeRecord    also a ProtocolViolation: larger than its schema allows
    ├── ForgedRecord      also a ProtocolViolation: the signature does not fit, or the body does not decode
    ├── WrongSchema       also a ProtocolViolation: another namespace, unknown schema, or a value of another type
    ├── WrongSigner       also a ProtocolViolation: this signer may not write this key, or did not deliver it himself
    ├── ExpiredRecord     its time is over, or the writer's clock is slow
    ├── FutureRecord      the writer's clock is fast
    ├── StaleRecord       a newer record of the same signer is held: .newest_us
    └── StoreFull         the store is at its limits and this signer has no claim on more room
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from dht.key import record_key
from peer.decoding import MALFORMED
from peer.errors import BarnraiseError, ProtocolViolation
from peer.identity import Identity, Signed, open_body, sign_body

T = TypeVar("T")

KIND: Final = "dht-record"
CLOCK_TOLERANCE_S: Final = 10.0
KEY_CHARS_MAX: Final = 256
ENVELOPE_BYTES_MAX: Final = 1024  # all of a signed record but its value: names, times, signer, signature

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


class WrongSigner(RecordError, ProtocolViolation):
    pass


class ExpiredRecord(RecordError):
    pass


class FutureRecord(RecordError):
    pass


class StaleRecord(RecordError):
    """`newest_us` is the issue time of the record that is held instead."""

    def __init__(self, message: str, newest_us: int) -> None:
        super().__init__(message)
        self.newest_us = newest_us


class StoreFull(RecordError):
    pass


@dataclass(frozen=True)
class Schema(Generic[T]):
    """One kind of record: the type of its value, its caps, and whose signature it needs.

    `signer(key, peer_id)` says whether that peer may write that key. Values are msgpack of `type`; a msgspec struct
    should bound its strings and lists with `msgspec.Meta`, for every reader decodes it.
    """

    name: str
    type: type[T]
    ttl_max_s: float
    size_max: int
    signer: Callable[[str, str], bool]

    def encode(self, value: T) -> bytes:
        """The bytes of a value. Raises OversizeRecord."""
        encoded = _encoder.encode(value)
        if len(encoded) > self.size_max:
            raise OversizeRecord(
                f"A {self.name!r} record of {len(encoded)} bytes is over its cap of {self.size_max}: publish less."
            )
        return encoded

    def decode(self, encoded: bytes) -> T:
        """The value of some bytes. Raises OversizeRecord or WrongSchema."""
        if len(encoded) > self.size_max:
            raise OversizeRecord(f"A {self.name!r} record of {len(encoded)} bytes is over its cap of {self.size_max}.")
        try:
            return msgspec.msgpack.decode(encoded, type=self.type)
        except MALFORMED as error:
            raise WrongSchema(f"A value is not of schema {self.name!r}: {error}.") from error


@dataclass(frozen=True)
class RecordEntry(Generic[T]):
    """What a reader gets for one subkey: who wrote it, the value, and when it expires on this machine's clock."""

    peer: str
    value: T
    expires_at: float


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The signed part. `issued_us`, microseconds since the epoch on the writer's clock, orders a signer's records."""

    namespace: str
    schema: str
    key: str
    value: bytes
    issued_us: int
    ttl_ms: int


@dataclass(frozen=True)
class Record:
    """A record whose claims were checked, all but its age, which changes."""

    signed: Signed
    body: Body
    value: object
    digest: bytes  # where it is stored: `record_key` of its namespace, schema and key

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
    """Bytes a signed record takes, give or take its framing."""
    return len(signed.body) + len(signed.signer) + len(signed.signature)


def seal(
    identity: Identity, namespace: str, schema: Schema[T], key: str, value: T, *, ttl_s: float, issued_us: int
) -> Signed:
    """Sign a value for publication. Raises what every store would refuse it for."""
    if not 0 < ttl_s <= schema.ttl_max_s:
        raise WrongSchema(f"A {schema.name!r} record may live at most {schema.ttl_max_s:g} s, not {ttl_s:g}.")
    if len(key) > KEY_CHARS_MAX:
        raise OversizeRecord(f"A key of {len(key)} characters is over the cap of {KEY_CHARS_MAX}: shorten it.")
    if not schema.signer(key, identity.peer_id):
        raise WrongSigner(f"{identity.peer_id} may not write {schema.name!r} records under {key!r}.")
    body = Body(namespace, schema.name, key, schema.encode(value), issued_us, round(ttl_s * 1000))
    return sign_body(identity, KIND, body)


def open_record(signed: Signed, namespace: str, schemas: Mapping[str, Schema[Any]]) -> Record:
    """Check everything about a record that does not depend on the time. Raises a RecordError that is a violation."""
    size_max = ENVELOPE_BYTES_MAX + max((schema.size_max for schema in schemas.values()), default=0)
    if signed_size(signed) > size_max:
        raise OversizeRecord(f"A record of {signed_size(signed)} bytes is over every cap of this run.")
    try:
        body = open_body(signed, KIND, Body)
    except ProtocolViolation as error:
        raise ForgedRecord(f"A record said to be of {signed.signer} is not: {error}") from error
    if body.namespace != namespace:
        raise WrongSchema(f"A record of namespace {body.namespace!r} came to {namespace!r}.")
    schema = schemas.get(body.schema)
    if schema is None:
        raise WrongSchema(f"This node knows no schema {body.schema[:64]!r}: are both sides of the same version?")
    if len(body.key) > KEY_CHARS_MAX:
        raise OversizeRecord(f"A key of {len(body.key)} characters is over the cap of {KEY_CHARS_MAX}.")
    if not schema.signer(body.key, signed.signer):
        raise WrongSigner(f"{signed.signer} may not write {schema.name!r} records under {body.key!r}.")
    if not 0 < body.ttl_ms <= schema.ttl_max_s * 1000:
        raise WrongSchema(
            f"A {schema.name!r} record wants to live {body.ttl_ms} ms; the cap is {schema.ttl_max_s:g} s."
        )
    return Record(signed, body, schema.decode(body.value), record_key(namespace, body.schema, body.key))


def check_delivery(record: Record, now_s: float) -> None:
    """A store's clock check. Owners deliver what they have just signed, so its age must be near zero; then a store
    need not trust the writer's clock: it counts the time to live from the arrival, on its own monotonic clock.

    Raises ExpiredRecord or FutureRecord.
    """
    age_s = now_s - record.body.issued_us / 1e6
    if age_s > CLOCK_TOLERANCE_S:
        raise ExpiredRecord(f"The record was signed {age_s:.1f} s ago by this clock: replayed, or set the clock (NTP).")
    _check_not_future(age_s)


def check_age(record: Record, now_s: float) -> None:
    """A reader's clock check: not issued in the future, not past its time to live. Raises as `check_delivery` does."""
    age_s = now_s - record.body.issued_us / 1e6
    if is_expired(record, now_s):
        raise ExpiredRecord(f"The record expired {age_s - record.ttl_s:.1f} s ago.")
    _check_not_future(age_s)


def is_expired(record: Record, now_s: float) -> bool:
    """Whether a reader whose clock shows `now_s` refuses it as past its time to live."""
    return now_s - record.body.issued_us / 1e6 > record.ttl_s + CLOCK_TOLERANCE_S


def _check_not_future(age_s: float) -> None:
    if age_s < -CLOCK_TOLERANCE_S:
        raise FutureRecord(f"The record was signed {-age_s:.1f} s in the future by this clock: set the clock (NTP).")
