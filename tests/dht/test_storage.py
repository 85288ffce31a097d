"""The store against a model, and against floods."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dht.key import record_key
from dht.origin import TRUSTED, Origin
from dht.records import Body, Record, StaleRecord, StoreFull
from dht.storage import Storage, StorageLimits, Stored
from peer.identity import Signed


def record(signer: str, key: str, issued_us: int, size: int = 100, ttl_ms: int = 9000) -> Record:
    """Return a record as `open_record` does. The store does not check signatures again. `size` is its size_bytes."""
    body = bytes(8) + issued_us.to_bytes(8, "big")
    signed = Signed(body.ljust(size - len(signer), b"\0"), signer, b"")
    return Record(signed, Body("run", "s", key, b"", issued_us, ttl_ms), None, record_key("run", "s", key))


def signers(storage: Storage, key: str, now: float = 0.0) -> set[str]:
    return {stored.record.signer for stored in storage.get(record_key("run", "s", key), now)}


LOOPBACK = Origin("127.0.0.0/24")

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
        prefix_records_per_key=2,
        prefix_bytes_per_key=600,
        prefix_records=4,
        prefix_bytes=1000,
    )
    origins = st.sampled_from([LOOPBACK, TRUSTED, Origin("8.8.8.0/24", is_public=True)])

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
        origin=origins,
    )
    def store(self, signer: str, key: str, issued: int, size: int, ttl_ms: int, origin: Origin) -> None:
        held = {stored.record.signer: stored for stored in self.storage.get(record_key("run", "s", key), self.now)}
        item = record(signer, key, issued, size, ttl_ms)
        try:
            self.storage.put(item, self.now, origin)
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
            strangers = [item for item in self.strangers() if item.record.body.key == key]
            assert sum(item.record.size_bytes for item in strangers) <= self.limits.bytes_per_key
            public = [item for item in strangers if item.origin.is_public]
            assert len(public) <= self.limits.prefix_records_per_key
            assert sum(item.record.size_bytes for item in public) <= self.limits.prefix_bytes_per_key
        public = [item for item in self.strangers() if item.origin.is_public]
        assert len(public) <= self.limits.prefix_records
        assert sum(item.record.size_bytes for item in public) <= self.limits.prefix_bytes
        for signer in SIGNERS:
            own = [item.size_bytes for item in alive if item.signer == signer]
            assert len(own) <= self.limits.records_per_signer
            assert sum(own) <= self.limits.bytes_per_signer

    def strangers(self) -> list[Stored]:
        held = [stored for key in KEYS for stored in self.storage.get(record_key("run", "s", key), self.now)]
        return [stored for stored in held if not stored.origin.trusted]

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


def test_a_full_store_takes_from_the_heaviest_signers() -> None:
    limits = StorageLimits(size_bytes=50_000, records_per_signer=100, bytes_per_signer=20_000)
    storage = Storage(limits)
    for number in range(5):
        for slot in range(50):
            storage.put(record(f"heavy-{number}", f"key-{slot}", 1, size=200, ttl_ms=1000 + slot), 0.0)
    assert storage.size_bytes == limits.size_bytes
    storage.put(record("honest", "key-0", 1, size=300), 0.0)
    assert storage.size_bytes <= limits.size_bytes
    assert "honest" in signers(storage, "key-0")
    with pytest.raises(StoreFull, match="holds its share"):
        for slot in range(50, 100):
            storage.put(record("heavy-1", f"key-{slot}", 1, size=200), 0.0)


def test_newcomers_displace_strangers_and_never_trusted_peers() -> None:
    storage = Storage(StorageLimits(records=100))
    for slot in range(5):
        storage.put(record("trusted", f"key-{slot}", 1), 0.0, TRUSTED)
    for number in range(1000):
        storage.put(record(f"sybil-{number}", f"key-{number}", 1), 0.0, LOOPBACK)
        assert len(storage) <= 100
    assert all("trusted" in signers(storage, f"key-{slot}") for slot in range(5))
    storage.put(record("newcomer", "key", 1), 1.0, LOOPBACK)
    assert signers(storage, "key", 1.0) == {"newcomer"}
    full = Storage(StorageLimits(records=5))
    for slot in range(5):
        full.put(record("trusted", f"key-{slot}", 1), 0.0, TRUSTED)
    with pytest.raises(StoreFull, match="of trusted peers"):
        full.put(record("sybil", "key", 1), 0.0, LOOPBACK)


IDENTITIES = 1100
RECORD_BYTES = 4000


@pytest.mark.parametrize("origin", [LOOPBACK, Origin("8.8.8.0/24", is_public=True)], ids=["loopback", "public"])
def test_many_identities_at_one_key_hide_no_peer(origin: Origin) -> None:
    """1,100 identities with 4 kB each, 37 a second, from the honest strangers' own prefix if it is loopback. So many
    cannot all stay connected."""
    storage = Storage(is_here=lambda signer: not signer.startswith("sybil"))
    honest_origin = LOOPBACK if origin is LOOPBACK else Origin("9.9.9.0/24", is_public=True)
    member, old = ("member", "old friend")
    seen_after: list[float] = []
    digest = record_key("run", "s", "member")
    for second in range(60):
        now = float(second)
        if second % 3 == 0:
            storage.put(record(member, "member", second + 1, size=700 + second), now, TRUSTED)
            storage.put(record(old, "member", second + 1, size=700 + second), now, honest_origin)
        if second >= 30 and second % 3 == 0:
            storage.put(record("newcomer", "member", second + 1, size=700), now, honest_origin)
        for number in range(second * IDENTITIES // 30, (second + 1) * IDENTITIES // 30):
            sybil = record(f"sybil-{number % IDENTITIES}", "member", second + 1, size=RECORD_BYTES, ttl_ms=60_000)
            storage.put(sybil, now + 0.5, origin)
        held = storage.get(digest, now + 0.9)
        assert held[0].record.signer == member, "trusted records are read first"
        strangers = [stored.record for stored in held if not stored.origin.trusted]
        assert sum(stored.size_bytes for stored in strangers) <= 64 << 10
        assert old in {stored.signer for stored in strangers}, "it is known longest"
        if second >= 30 and "newcomer" in {stored.signer for stored in strangers}:
            seen_after.append(now - 30)
    assert seen_after[0] <= 5.0
    assert len(seen_after) == 30
    if origin.is_public:
        assert sum(stored.origin == origin for stored in storage.get(digest, 60.0)) <= 4


def test_a_public_prefix_has_its_share_of_the_store() -> None:
    storage, crowd = Storage(), Origin("8.8.8.0/24", is_public=True)
    for number in range(1000):
        storage.put(record(f"sybil-{number}", f"key-{number}", 1), 0.0, crowd)
    assert len(storage) == 256
    storage.put(record("neighbour", "key", 1), 1.0, crowd)
    assert signers(storage, "key", 1.0) == {"neighbour"}


def test_a_key_full_of_trusted_peers_takes_their_refreshes() -> None:
    storage = Storage(StorageLimits(records_per_key=10))
    for number in range(10):
        storage.put(record(f"trusted-{number}", "key", 1, size=1000), 0.0, TRUSTED)
    for number in range(10):
        storage.put(record(f"trusted-{number}", "key", 2, size=2000), 1.0, TRUSTED)
    with pytest.raises(StoreFull, match="the key holds 10"):
        storage.put(record("sybil", "key", 1), 1.0, LOOPBACK)
