"""The bounds of a member's record: other peers compute with it."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import msgspec
import pytest

from dht.records import KIND, Body, WrongKey, WrongSchema, WrongSigner, open_record
from peer.events import EventLog
from peer.identity import Identity, Signed, sign_body
from peer.net.host import open_host
from peer.net.reach import LOCAL
from swarm.membership.member_record import (
    CREDENTIAL_BYTES_MAX,
    MEMBERS,
    RECORD_BYTES_MAX,
    MemberRecord,
    member_record,
)
from swarm.protocol.head import Head
from swarm.protocol.ledger import Ledger
from swarm.run.credentials import CHAIN_MAX, Link
from tests.swarm.membership.test_bans import record

FIRST_HEAD = Head("run", 0, 0, b"", bytes(32), (), Ledger(), 0, 0)


def read_back(changes: dict[str, object]) -> MemberRecord:
    content = {**msgspec.to_builtins(record("s"), builtin_types=(bytes,)), **changes}
    return msgspec.msgpack.decode(msgspec.msgpack.encode(content), type=MemberRecord)


def test_a_record_says_where_a_peer_is_or_is_going() -> None:
    here = read_back({"role": "stage", "stage": 2, "since": 50.0})
    assert not here.moving(60.0)
    going = read_back({"role": "stage", "stage": 2, "source": 0, "since": 50.0, "ready_at": 75.0})
    assert going.moving(60.0) and not going.moving(75.0)
    assert not read_back({"role": "feeder", "ready_at": 75.0}).moving(60.0), "to no stage"
    assert (record("s").stage, record("s").source) == (-1, -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "boss"), ("stage", -2), ("stage", 1024), ("source", 1 << 40), ("stage", 0.5),
        *((field, bad) for field in ("queue", "service_s", "download_bytes_s", "memory_bytes", "since", "ready_at")
          for bad in (math.nan, math.inf, -1.0, 1e300)),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_refused(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        read_back({field: value})


RUN = "run"
SIGNER = Identity.generate()
REFUSED: list[tuple[str, object]] = [
    ("name", "\x1b[31mred"), ("name", "\u202efdp.exe"), ("phase", "two\nlines"), ("version", "\x9b2J"),
    ("speed", math.nan), ("speed", math.inf), ("loss", math.inf), ("loss", -math.inf), ("val_loss", math.nan),
    ("at", math.nan), ("at", -1.0), ("joined_at", 1e308), ("round", (1 << 63) - 1), ("round", -(1 << 63)),
    ("term", 1 << 41), ("tokens", (1 << 64) - 1), ("bytes_up", -1), ("members", -1), ("members", 1025),
    ("head", b"h" * 31), ("head", b"h" * 33), ("state_hash", b"s"), ("session", "s" * 65),
]  # fmt: skip


def published(changes: dict[str, object], key: str = RUN) -> Signed:
    """Sign a record with any content, as an attacker does."""
    value = msgspec.msgpack.encode({**msgspec.to_builtins(record("s"), builtin_types=(bytes,)), **changes})
    return sign_body(SIGNER, KIND, Body(RUN, MEMBERS.name, key, value, int(time.time() * 1e6), 9000))


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_store_refuses_a_value_that_no_honest_peer_writes(field: str, value: object) -> None:
    with pytest.raises(WrongSchema):
        open_record(published({field: value}), RUN, {MEMBERS.name: MEMBERS})


def test_a_store_takes_honest_values_up_to_their_bounds() -> None:
    honest = {
        "name": "Zo\u00eb's box", "round": 1 << 40, "tokens": (1 << 63) - 1, "members": 1024, "head": b"h" * 32,
        "loss": -1.5, "at": time.time(),
    }  # fmt: skip
    opened = open_record(published(honest), RUN, {MEMBERS.name: MEMBERS})
    assert isinstance(opened.value, MemberRecord) and opened.value.round == 1 << 40
    open_record(published({"round": -1, "head": b""}), RUN, {MEMBERS.name: MEMBERS})


def test_a_store_keeps_only_the_key_that_the_run_reads() -> None:
    with pytest.raises(WrongKey):
        open_record(published({}, key="another"), RUN, {MEMBERS.name: MEMBERS})


def test_a_run_can_demand_more_of_a_record() -> None:
    def check(signer: str, value: MemberRecord) -> None:
        if signer == SIGNER.peer_id and not value.credential:
            raise WrongSigner(f"{signer} shows no credential: ask for an invite")

    demanding = replace(MEMBERS, check=check)
    with pytest.raises(WrongSigner, match="credential"):
        open_record(published({}), RUN, {MEMBERS.name: demanding})


async def test_the_longest_record_fits() -> None:
    relay = f"/ip4/203.0.113.201/tcp/40001/p2p/{SIGNER.peer_id}/p2p-circuit"
    announced = tuple(f"/ip4/203.0.113.{number}/tcp/40001" for number in range(200, 212))
    link = Link("invite", bytes(32), 1, 1 << 39, bytes(64))
    async with open_host(identity=SIGNER, events=EventLog(), reach=replace(LOCAL, announce=announced)) as host:
        host.traversal._reserved.append(relay.removesuffix("/p2p-circuit"))
        long = member_record(
            host,
            FIRST_HEAD,
            session="s" * 64,
            name="\x1b" + "x" * 80,
            role="coordinator",
            phase="p" * 64,
            joined_at=1e9,
        )
    assert len(long.addresses) == 7 and long.addresses[-1] == relay
    assert long.name == "?" + "x" * 63
    huge = dict.fromkeys(("queue", "service_s", "rate", "download_bytes_s", "memory_bytes", "since", "ready_at"), 1.5)
    long = msgspec.structs.replace(
        long, version="v" * 64, head=bytes(32), state_hash=bytes(32), tokens=1 << 62, bytes_up=1 << 62,
        bytes_down=1 << 62, loss=1.5, val_loss=1.5, val_round=1 << 40, stage=1000, source=1000, **huge,
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(long)) <= RECORD_BYTES_MAX
    assert len(msgspec.msgpack.encode((link,) * CHAIN_MAX)) <= CREDENTIAL_BYTES_MAX
