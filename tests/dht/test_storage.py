"""The store against a model, and against floods."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dht.key import record_key
from dht.records import Body, Record, StaleRecord, StoreFull
from dht.storage import Storage, StorageLimits
from peer.identity import Signed


def record(signer: str, key: str, issued_us: int, size: int = 100, ttl_ms: int = 9000) -> Record:
    """Return a record as `open_record` does. The store does not check signatures again. `size` is its size_bytes."""
    body = bytes(8) + issued_us.to_bytes(8, "big")
    signed = Signed(body.ljust(size - len(signer), b"\0"), signer, b"")
    return Record(signed, Body("run", "s", key, b"", issued_us, ttl_ms), None, record_key("run", "s", key))


SIGNERS = ["a", "b", "c", "d"]
KEYS = ["k1", "k2", "k3"]


class AgainstModel(RuleBasedStateMachine):
    """Any sequence of puts and times, under tight limits, compared with a plain dict."""

    limits = StorageLimits(
        records=6,
        size_bytes=1500,
        records_per_key=3,
        bytes_per_key=900,
        records_per_signer=2,
        bytes_per_signer=700,
        bytes_guaranteed=200,
    )

    def __init__(self) -> None:
        super().__init__()
        self.storage = Storage(self.limits)
        self.now = 0.0
        self.put: dict[tuple[str, str], tuple[int, float]] = {}  # (key, signer) -> (issued, expires)

    @rule(
        signer=st.sampled_from(SIGNERS),
        key=st.sampled_from(KEYS),
        issued=st.integers(1, 20),
        size=st.integers(40, 500),
        ttl_ms=st.integers(1, 9000),
    )
    def store(self, signer: str, key: str, issued: int, size: int, ttl_ms: int) -> None:
        held = {stored.record.signer: stored for stored in self.storage.get(record_key("run", "s", key), self.now)}
        item = record(signer, key, issued, size, ttl_ms)
        try:
            self.storage.put(item, self.now)
        except StaleRecord as error:
            assert error.newest_us == held[signer].record.body.issued_us >= issued
        except StoreFull:
            after = {stored.record.signer for stored in self.storage.get(record_key("run", "s", key), self.now)}
            assert signer not in held or signer in after  # a refused refresh does not cost the slot
        else:
            if signer not in held or held[signer].record.signed != item.signed:
                self.put[key, signer] = (issued, self.now + ttl_ms / 1000)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(signer=st.sampled_from(SIGNERS))
    def leave(self, signer: str) -> None:
        self.storage.drop_signer(signer)
        for key in KEYS:
            self.put.pop((key, signer), None)

    @invariant()
    def holds_nothing_but_the_freshest_alive(self) -> None:
        for key in KEYS:
            for stored in self.storage.get(record_key("run", "s", key), self.now):
                issued, expires = self.put[key, stored.record.signer]
                assert stored.record.body.issued_us == issued
                assert stored.expires_at == expires > self.now

    @invariant()
    def is_within_its_limits(self) -> None:
        alive = [stored.record for key in KEYS for stored in self.storage.get(record_key("run", "s", key), self.now)]
        assert len(alive) <= len(self.storage) <= self.limits.records
        assert sum(item.size_bytes for item in alive) <= self.storage.size_bytes <= self.limits.size_bytes
        for key in KEYS:
            assert sum(item.body.key == key for item in alive) <= self.limits.records_per_key
        for signer in SIGNERS:
            own = [item.size_bytes for item in alive if item.signer == signer]
            assert len(own) <= self.limits.records_per_signer
            assert sum(own) <= self.limits.bytes_per_signer

    def teardown(self) -> None:
        self.storage.sweep(self.now + 10)
        assert len(self.storage) == self.storage.size_bytes == 0


AgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_against_a_model = AgainstModel.TestCase


def test_older_records_are_refused_and_the_same_is_a_no_op() -> None:
    storage = Storage()
    storage.put(record("a", "k", 5), 0.0)
    storage.put(record("a", "k", 5), 1.0)
    assert storage.get(record_key("run", "s", "k"), 8.9)[0].expires_at == 9.0  # a replay does not prolong a record
    with pytest.raises(StaleRecord):
        storage.put(record("a", "k", 4), 1.0)
    with pytest.raises(StaleRecord):
        storage.put(record("a", "k", 5, size=120), 1.0)


def test_a_flood_of_one_identity_is_bounded_by_its_own_share() -> None:
    limits = StorageLimits(records_per_signer=10, bytes_per_signer=5000)
    storage = Storage(limits)
    taken = 0
    for number in range(1000):
        try:
            storage.put(record("flood", f"key-{number}", 1), 0.0)
            taken += 1
        except StoreFull:
            pass
    assert taken == len(storage) == 10


def test_the_heaviest_signer_gives_way_to_a_small_one() -> None:
    limits = StorageLimits(size_bytes=50_000, records_per_signer=64, bytes_per_signer=10_000, bytes_guaranteed=1000)
    storage = Storage(limits)
    for number in range(5):
        for slot in range(50):
            storage.put(record(f"heavy-{number}", f"key-{slot}", 1, size=200, ttl_ms=1000 + slot), 0.0)
    assert storage.size_bytes == limits.size_bytes
    storage.put(record("honest", "key-0", 1, size=300), 0.0)
    assert storage.size_bytes <= limits.size_bytes
    assert "honest" in {stored.record.signer for stored in storage.get(record_key("run", "s", "key-0"), 0.0)}


def test_many_small_signers_fill_a_store_but_evict_no_other() -> None:
    limits = StorageLimits(records=100, bytes_guaranteed=1000)
    storage = Storage(limits)
    for slot in range(5):
        storage.put(record("honest", f"key-{slot}", 1, ttl_ms=9000), 0.0)
    refused = 0
    for number in range(1000):
        try:
            storage.put(record(f"sybil-{number}", f"key-{number}", 1), 0.0)
        except StoreFull:
            refused += 1
    assert refused == 905
    for slot in range(5):
        storage.put(record("honest", f"key-{slot}", 2), 5.0)  # a refresh of the same size is never refused
    storage.put(record("late", "key", 1), 9.5)  # and expiry frees room
    assert len(storage) == 6
