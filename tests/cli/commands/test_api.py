"""What `peer api` and `peer chat` refuse before they connect, and keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peer.identity import Identity
from swarm.gateway.errors import ApiError
from swarm.gateway.limits import ApiKeys, read_keys
from swarm.run.invite import Invite
from tests.cli.support.typed import Peer, said

AUTHORITY = Identity.generate().peer_id


@pytest.fixture
def invite() -> str:
    return str(Invite("a" * 32, AUTHORITY, (f"/ip4/127.0.0.1/tcp/1/p2p/{AUTHORITY}",)))


def test_other_machines_need_a_key(peer: Peer, invite: str) -> None:
    for listen in ("0.0.0.0:8080", "[::]:8080", "192.0.2.1:80"):
        assert "give --key or --key-file" in said(peer("api", invite, "--listen", listen), 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--listen", "example.com:80"], "no IP address and port"),
        (["--key", "a", "--key-file", "keys"], "choose one"),
        (["--key", " "], "--key is empty"),
        (["--allow-origin", "app.example"], "app.example is no origin: write scheme, host and port"),
        (["--key-file", "no/such/file"], "cannot be read"),
        (
            ["--template", "no/such/file"],
            "no/such/file cannot be read (No such file or directory): give a chat template",
        ),
        (
            ["--tool-parser", "xml"],
            "--tool-parser xml is not known: give auto, hermes, qwen3_coder",
        ),
        (["--new-key", "me"], "INVITE and --new-key were both given"),
    ],
)
def test_wrong_options_name_the_remedy(
    peer: Peer, invite: str, options: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reason in said(peer("api", invite, *options), 2)


def test_a_key_and_a_token_may_come_from_the_environment(
    peer: Peer, invite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the process list does not show them. An option goes before; beside a file of keys one is refused."""
    kept: list[object] = []
    monkeypatch.setattr("cli.commands.api.run_until_stopped", lambda run, tied: kept.append(run.__self__.limits.keys))
    monkeypatch.setattr("cli.commands.monitor.run_until_stopped", lambda run, tied: kept.append(run.__self__.token))
    monkeypatch.setenv("PEER_API_KEY", "sk-a sk-b")
    monkeypatch.setenv("PEER_MONITOR_TOKEN", "t-a")
    monitor = ["monitor", invite, "--db", tmp_path / "db"]
    assert peer("api", invite, "--listen", "0.0.0.0:0").code == peer("api", invite, "--key", "sk-c").code == 0
    assert peer(*monitor).code == peer(*monitor, "--token", "t-b").code == 0
    from_environment, from_option = kept[:2]
    assert isinstance(from_environment, ApiKeys) and isinstance(from_option, ApiKeys)
    assert [from_environment.holder(f"Bearer {key}") for key in ("sk-a", "sk-b")] == ["key 1", "key 2"]
    assert from_option.holder("Bearer sk-c") == "key 1"
    with pytest.raises(ApiError):
        from_option.holder("Bearer sk-a")
    assert kept[2:] == ["t-a", "t-b"]
    assert "--key (or PEER_API_KEY) and --key-file were both" in said(peer("api", invite, "--key-file", "keys"), 2)
    monkeypatch.setenv("PEER_MONITOR_TOKEN", "é")
    assert "--token (or PEER_MONITOR_TOKEN) is empty or has other" in said(peer(*monitor), 2)


@pytest.mark.parametrize("package", ["starlette", "hypercorn"])
def test_a_missing_web_server_is_named(peer: Peer, invite: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert 'pip install starlette "hypercorn[trio]<0.19"' in said(peer("api", invite), 2)


def test_a_chat_needs_no_web_server() -> None:
    """Neither does `peer generate --chat`: what they use of the gateway imports none."""
    probe = """
import sys, cli.commands.chat, cli.commands.generate, swarm.gateway.conversation, swarm.gateway.template
sys.exit(bool({"starlette", "hypercorn"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", probe], timeout=120, check=False).returncode == 0


def test_a_new_key_is_printed_once_and_kept_as_a_hash(peer: Peer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first, second = (peer("api", "--new-key", name, "--key-file", path).stdout.strip() for name in ("Ada", "Bo\nb"))
    assert first.startswith("sk-") and first not in path.read_text() and len(path.read_text().splitlines()) == 2
    keys = read_keys(path)
    assert [keys.holder(f"Bearer {key}") for key in (first, second)] == ["Ada", "Bo?b"]
    assert path.stat().st_mode & 0o077 == 0


def test_a_new_key_spoils_no_file(peer: Peer, tmp_path: Path) -> None:
    assert "give --key-file" in said(peer("api", "--new-key", "me"), 2)
    assert "cannot be written" in said(peer("api", "--new-key", "me", "--key-file", tmp_path / "no" / "file"), 2)
    path = tmp_path / "authorized_keys"
    path.write_text("ssh-ed25519 AAAA")
    assert "begins with no blake3 hash" in said(peer("api", "--new-key", "me", "--key-file", path), 2)
    assert path.read_text() == "ssh-ed25519 AAAA"
    path.write_text(f"{'a' * 64} Ada")  # without an end of its line
    assert peer("api", "--new-key", "me", "--key-file", path).code == 0
    assert [line.split()[1] for line in path.read_text().splitlines()] == ["Ada", "me"]


def test_an_invite_is_needed(peer: Peer) -> None:
    assert "give either INVITE or --model" in said(peer("api"), 2)
    assert peer("api", "nonsense").code == peer("chat", "nonsense").code == 2
