"""The bounds of a member's record: other peers compute with it."""

from __future__ import annotations

import math

import msgspec
import pytest

from swarm.membership.member_record import MEMBERS, MemberRecord
from tests.swarm.membership.test_bans import record


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


def test_a_full_record_fits() -> None:
    longest = "x" * 128
    full = read_back(
        {
            "session": longest, "name": longest, "version": longest, "phase": longest, "addresses": ["y" * 256] * 8,
            "head": b"h" * 32, "state_hash": b"s" * 32, "stage": 1000, "source": 1000, "queue": 1e17,
        }
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(full)) < MEMBERS.size_max
