from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ConfigError, ResourceError
from peer.identity import Identity
from peer.net.address_book import AddressBook, closed_range, split_address

PEER, RELAY = Identity.generate().peer_id, Identity.generate().peer_id
A, B = "/ip4/203.0.113.7/tcp/4001", "/dns4/example.org/tcp/4001"
CIRCUIT = f"/ip4/203.0.113.9/tcp/4001/p2p/{RELAY}/p2p-circuit"


def test_fresh_addresses_come_first_and_relayed_ones_last() -> None:
    book = AddressBook()
    book.add(PEER, [CIRCUIT, A])
    assert book.get(PEER) == (A, CIRCUIT)
    book.add(PEER, [f"{B}/p2p/{PEER}"])
    assert book.get(PEER) == (B, A, CIRCUIT)
    book.add(PEER, [A])
    assert book.get(PEER) == (A, B, CIRCUIT)


@pytest.mark.parametrize(
    "useless",
    [
        "/ip4/0.0.0.0/tcp/4001",
        "/ip6/::/tcp/4001",
        "/ip4/203.0.113.7/tcp/0",
        "/ip4/203.0.113.7/udp/4001/quic-v1",
        "/ip4/203.0.113.7",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}",
        "/unix/tmp/socket",
        "not an address",
        "",
        "/ip4/203.0.113.7/tcp/4001" + "/p2p-circuit" * 100,
    ],
    ids=range(10),  # names the same in every process
)
def test_what_cannot_be_dialled_is_skipped(useless: str) -> None:
    book = AddressBook()
    book.add(PEER, [useless, A])
    assert book.get(PEER) == (A,)


@given(st.lists(st.text(max_size=40)))
def test_garbage_from_a_peer_is_harmless(addresses: list[str]) -> None:
    book = AddressBook()
    book.add(PEER, addresses)
    book.add("no peer", [A])
    assert "no peer" not in book.peers


def test_both_dimensions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.net.address_book._PEERS_MAX", 3)
    book = AddressBook(addresses_per_peer=2)
    peers = [Identity.generate().peer_id for _ in range(4)]
    for peer in peers:
        book.add(peer, [f"/ip4/10.0.0.{n}/tcp/1" for n in range(5)])
    assert book.peers == tuple(peers[1:])
    assert book.get(peers[1]) == ("/ip4/10.0.0.0/tcp/1", "/ip4/10.0.0.1/tcp/1")


def test_the_book_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "home" / "book.json"
    book = AddressBook()
    book.add(PEER, [A, CIRCUIT])
    book.save(path)
    loaded = AddressBook()
    loaded.load(path)
    assert loaded.get(PEER) == (A, CIRCUIT)


@pytest.mark.parametrize("content", [b"", b'{"addresses": {"', b'{"addresses": [1]}', b"\xff"])
def test_a_torn_cache_adds_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "book.json"
    path.write_bytes(content)
    book = AddressBook()
    book.load(path)
    assert book.peers == ()


def test_a_full_disk_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="--home"):
        AddressBook().save(tmp_path / "file" / "book.json")


def test_a_full_address_is_split_or_refused_with_a_remedy() -> None:
    assert split_address(f"{A}/p2p/{PEER}") == (A, PEER)
    assert split_address(f"{CIRCUIT}/p2p/{PEER}") == (CIRCUIT, PEER)
    with pytest.raises(ConfigError, match="/p2p/"):
        split_address(A)
    with pytest.raises(ConfigError, match="cannot be dialled"):
        split_address(f"/ip4/0.0.0.0/tcp/1/p2p/{PEER}")


def test_a_claim_becomes_an_address_when_a_better_source_names_it() -> None:
    book = AddressBook()
    peer = Identity.generate().peer_id
    here, there = "/ip4/203.0.113.7/tcp/4001", "/ip4/203.0.113.7/tcp/4002"
    book.claim(peer, [here, f"{there}/p2p/{peer}", "nonsense"])
    assert book.get(peer) == (here, there) and book.vouched(peer) == ()
    assert book.is_claim(peer, here)
    book.add(peer, [here])
    assert not book.is_claim(peer, here) and book.is_claim(peer, there)
    book.claim(peer, [here])
    assert book.vouched(peer) == (here,) and not book.is_claim(peer, here)


def test_claims_crowd_out_no_address() -> None:
    book = AddressBook()
    peer = Identity.generate().peer_id
    book.add(peer, ["/ip4/203.0.113.7/tcp/4001"])
    for _ in range(1100):
        book.claim(Identity.generate().peer_id, ["/ip4/203.0.113.8/tcp/1"])
    assert book.vouched(peer) == ("/ip4/203.0.113.7/tcp/4001",)
    assert len(book._claims) == 1024


def test_ranges_that_mean_another_machine_on_each_network() -> None:
    for ip in (
        "127.0.0.1",
        "10.1.2.3",
        "172.31.0.1",
        "192.168.1.1",
        "169.254.1.1",
        "100.64.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
    ):
        assert closed_range(ip) is not None, ip
    for ip in ("8.8.8.8", "172.32.0.1", "2001:4860::1"):
        assert closed_range(ip) is None, ip


def test_claims_take_a_few_megabytes_at_most() -> None:
    book = AddressBook()
    long = [f"/dns4/{'x' * 60}.{'y' * 60}.{'z' * 60}.{n}/tcp/1" for n in range(20)]
    for number in range(1_100):
        peer = Identity.generate().peer_id
        book.claim(peer, long if number % 100 == 99 else long[:1])
        book.claim(peer, [f"/dns4/{'x.' * 200}/tcp/1"])
    assert len(book._claims) == 1024
    most = max(sum(map(len, claims)) for claims in book._claims.values())
    assert most > 2048 and most * len(book._claims) <= 4 << 20
