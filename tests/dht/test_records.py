from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.key import record_key
from dht.records import (
    CLOCK_TOLERANCE_S,
    KIND,
    Body,
    ExpiredRecord,
    ForgedRecord,
    FutureRecord,
    OversizeRecord,
    Record,
    Schema,
    UnknownSchema,
    WrongSchema,
    WrongSigner,
    check_age,
    check_delivery,
    open_record,
    sign_record,
)
from peer.errors import ProtocolViolation
from peer.identity import Identity, Signed, sign_body

RUN = "run-1"
ALICE = Identity.generate()
MALLORY = Identity.generate()
NOW_US = 1_700_000_000_000_000


class Card(msgspec.Struct):
    number: int
    text: str = ""


CARDS = Schema("card", Card, ttl_max_s=30.0, size_max=200, signer=lambda key, peer: True)
ORDERS = Schema("order", Card, ttl_max_s=30.0, size_max=200, signer=lambda key, peer: peer == ALICE.peer_id)
SCHEMAS = {schema.name: schema for schema in (CARDS, ORDERS)}


def card(number: int = 1, text: str = "") -> Signed:
    return sign_record(ALICE, RUN, CARDS, "key", Card(number, text), ttl_s=9.0, issued_us=NOW_US)


def opened(signed: Signed) -> Record:
    return open_record(signed, RUN, SCHEMAS)


def signed_by(identity: Identity, **changes: object) -> Signed:
    """A properly signed record with some claim of its body changed."""
    value = msgspec.msgpack.encode(Card(1))
    body = Body(RUN, "card", "key", value, NOW_US, 9000)
    return sign_body(identity, KIND, msgspec.structs.replace(body, **changes))


@given(st.integers(-(2**63), 2**63 - 1), st.text(max_size=20), st.floats(0.1, 30.0))
def test_a_signed_record_opens(number: int, text: str, ttl_s: float) -> None:
    signed = sign_record(ALICE, RUN, CARDS, "key", Card(number, text), ttl_s=ttl_s, issued_us=NOW_US)
    record = opened(signed)
    assert record.value == Card(number, text)
    assert record.signer == ALICE.peer_id
    assert record.digest == record_key(RUN, "card", "key")
    assert record.ttl_s == pytest.approx(ttl_s, abs=1e-3)


@settings(max_examples=200)
@given(st.data())
def test_no_changed_byte_passes(data: st.DataObject) -> None:
    signed = card()
    part = data.draw(st.sampled_from(["body", "signature"]))
    original = getattr(signed, part)
    position = data.draw(st.integers(0, len(original) - 1))
    flip = data.draw(st.integers(1, 255))
    changed = bytearray(original)
    changed[position] ^= flip
    with pytest.raises(ForgedRecord):
        opened(msgspec.structs.replace(signed, **{part: bytes(changed)}))


@given(st.binary(max_size=300), st.text(max_size=60), st.binary(max_size=70))
def test_garbage_is_refused_as_forged(body: bytes, signer: str, signature: bytes) -> None:
    with pytest.raises(ForgedRecord):
        opened(Signed(body, signer, signature))


@given(st.binary(max_size=150))
def test_a_signed_value_of_another_type_is_a_wrong_schema(value: bytes) -> None:
    try:
        msgspec.msgpack.decode(value, type=Card)
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises(WrongSchema):
            opened(signed_by(ALICE, value=value))


def test_a_record_with_another_signer_is_forged() -> None:
    with pytest.raises(ForgedRecord):
        opened(msgspec.structs.replace(card(), signer=MALLORY.peer_id))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"namespace": "run-2"}, WrongSchema),
        ({"schema": "order"}, WrongSigner),
        ({"ttl_ms": 30_001}, WrongSchema),
        ({"ttl_ms": 0}, WrongSchema),
        ({"ttl_ms": -5}, WrongSchema),
        ({"key": "k" * 257}, OversizeRecord),
        ({"value": b"\x00" * 201}, OversizeRecord),
        ({"value": b"\x00" * 5000}, OversizeRecord),
        ({"value": b"not msgpack"}, WrongSchema),
    ],
)
def test_false_claims_are_refused_by_name_even_when_signed(
    changes: dict[str, object], error: type[ProtocolViolation]
) -> None:
    with pytest.raises(error):
        opened(signed_by(MALLORY, **changes))


@pytest.mark.parametrize("size", [3, 5000])
def test_a_record_of_a_later_schema_is_refused_without_blame(size: int) -> None:
    with pytest.raises(UnknownSchema, match="no schema 'later': upgrade") as caught:
        opened(signed_by(MALLORY, schema="later", value=bytes(size)))
    assert not isinstance(caught.value, ProtocolViolation)


def test_fields_of_a_later_version_are_signed_and_ignored() -> None:
    class LaterCard(Card):
        colour: str = "red"

    value = msgspec.msgpack.encode(LaterCard(7))
    body: Any = [RUN, "card", "key", value, NOW_US, 9000, "a later field of the body"]
    signed = sign_body(ALICE, KIND, body)
    record = opened(signed)
    assert record.value == Card(7)
    assert record.signed == signed and b"colour" in record.signed.body, "what came is what is passed on"
    body[-1] = "another"
    with pytest.raises(ForgedRecord):
        opened(msgspec.structs.replace(signed, body=msgspec.msgpack.encode(body)))
    body[-1] = "x" * 2000
    with pytest.raises(OversizeRecord, match="over its cap"):
        opened(sign_body(ALICE, KIND, body))


def test_a_signature_for_another_purpose_does_not_pass() -> None:
    body = Body(RUN, "card", "key", msgspec.msgpack.encode(Card(1)), NOW_US, 9000)
    with pytest.raises(ForgedRecord):
        opened(sign_body(ALICE, "manifest", body))


def test_a_writer_gets_the_error_before_anything_is_sent() -> None:
    with pytest.raises(OversizeRecord):
        card(text="x" * 300)
    with pytest.raises(WrongSigner):
        sign_record(MALLORY, RUN, ORDERS, "key", Card(1), ttl_s=9.0, issued_us=NOW_US)
    with pytest.raises(WrongSchema):
        sign_record(ALICE, RUN, CARDS, "key", Card(1), ttl_s=31.0, issued_us=NOW_US)


@given(st.floats(-100, 100))
def test_a_store_accepts_a_new_record_within_the_tolerance(age_s: float) -> None:
    record, now = opened(card()), NOW_US / 1e6 + age_s
    if age_s > CLOCK_TOLERANCE_S + 1e-3:
        with pytest.raises(ExpiredRecord):
            check_delivery(record, now)
    elif age_s < -CLOCK_TOLERANCE_S - 1e-3:
        with pytest.raises(FutureRecord):
            check_delivery(record, now)
    elif abs(age_s) < CLOCK_TOLERANCE_S - 1e-3:
        check_delivery(record, now)


def test_a_reader_accepts_a_record_until_it_expires() -> None:
    record = opened(card())
    check_age(record, NOW_US / 1e6 + 9.0 + CLOCK_TOLERANCE_S - 0.1)
    with pytest.raises(ExpiredRecord):
        check_age(record, NOW_US / 1e6 + 9.0 + CLOCK_TOLERANCE_S + 0.1)
    with pytest.raises(FutureRecord):
        check_age(record, NOW_US / 1e6 - CLOCK_TOLERANCE_S - 0.1)
