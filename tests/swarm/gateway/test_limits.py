"""API keys and quotas."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.errors import ConfigError
from swarm.gateway.errors import ApiError
from swarm.gateway.limits import ApiKeys, Quotas, key_hash, new_key, read_keys
from swarm.web.listening import ListenAddress


def test_a_key_file_holds_hashes_and_names(tmp_path: Path) -> None:
    path, key = tmp_path / "keys", new_key()
    path.write_text(f"# keys\n\n{key_hash(key)} Ada Lovelace\n{key_hash('other').upper()}\n")
    keys = read_keys(path)
    assert (keys.holder(f"Bearer {key}"), keys.holder("Bearer other")) == ("Ada Lovelace", "line 4")
    with pytest.raises(ApiError) as refused:
        keys.holder("Bearer " + key_hash(key))
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("content", ["", "# none\n", "sk-plain key\n", "abc\n", "é" * 64 + "\n"])
def test_a_key_file_without_hashes_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match="keys"):
        read_keys(tmp_path / "keys")


def test_without_keys_every_request_may() -> None:
    assert ApiKeys().holder("") == ApiKeys().holder("Bearer any") == "" and not ApiKeys().needed


def test_so_many_requests_in_any_minute() -> None:
    times = [100.0, 110.0, 120.0, 130.0, 130.0, 160.0, 160.0]
    quotas = Quotas(3, 9, clock=lambda: times.pop(0))
    for _ in range(3):
        with quotas.one("a"):
            pass
    with pytest.raises(ApiError) as refused, quotas.one("a"):
        pass
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "30"})
    with quotas.one("b"):  # another key has its own account
        pass
    with quotas.one("a"):
        pass
    with pytest.raises(ApiError), quotas.one("a"):
        pass


def test_so_many_requests_at_once() -> None:
    quotas = Quotas(None, 2)
    with quotas.one("a"), quotas.one("a"), quotas.one("b"), pytest.raises(ApiError), quotas.one("a"):
        pass
    with quotas.one("a"), quotas.one("a"):
        pass


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:8080", "0.0.0.0", 8080, False),
        ("[::]:8080", "::", 8080, False),
        ("192.0.2.7:1", "192.0.2.7", 1, False),
    ],
)
def test_addresses_to_listen_at(text: str, host: str, port: int, is_loopback: bool) -> None:
    address = ListenAddress.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, is_loopback)


@pytest.mark.parametrize(
    "text", ["8080", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "example.com:80", ":80", "[::1]", "a:-1"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8080"):
        ListenAddress.parse(text)
