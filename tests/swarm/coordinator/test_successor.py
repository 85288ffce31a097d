"""A coordinator's machine is lost, and the operator with its locked key goes on on another one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import trio
from nacl.pwhash import argon2id

from peer.errors import ConfigError, ResourceError
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.reach import LOCAL
from swarm.coordinator import successor
from swarm.coordinator.coordinator import CoordinatorConfig, run_coordinator
from swarm.coordinator.successor import enter_home, make_successor, open_successor, read_successor, take_over
from swarm.placement.stages import open_store
from swarm.protocol.agreement.records import RESTORED_KEY
from swarm.rounds.records import RecordFiles
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import load_run_files, save_run_files
from tests.swarm.client.test_download import coordinated, patient  # noqa: F401  a fixture that acts by itself
from tests.swarm.coordinator.run_scene import make_run

WORDS = "correct horse battery"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least work for a guess that the library allows."""
    monkeypatch.setattr(successor, "_OPS", argon2id.OPSLIMIT_MIN)
    monkeypatch.setattr(successor, "_MEMORY", argon2id.MEMLIMIT_MIN)


async def test_a_successor_takes_over_with_what_members_hold(tmp_path: Path) -> None:
    lost, file, found = Home(tmp_path / "home"), tmp_path / "kept" / "successor.json", Home(tmp_path / "new")
    async with coordinated(lost.path) as run:
        lost.invite.write_text(str(run.invite))
        assert make_successor(lost, file, lambda: WORDS) == run.manifest.run.name
        assert file.stat().st_mode & 0o077 == 0
        seed = Identity.load_or_create(lost.identity).seed
        assert seed not in file.read_bytes() and seed.hex().encode() not in file.read_bytes()
        heir = open_successor(file, WORDS)
        assert heir.identity.peer_id == run.manifest.authority and heir.addresses == run.invite.addresses
        async with run.replica(0, [5]), run.replica(1, [4]), run.replica(2, [5]):
            enter_home(found, heir)
            with trio.fail_after(120):
                await take_over(found, heir)
    kept = load_run_files(found.path)
    assert kept == load_run_files(lost.path)
    for stage, number in enumerate((5, 4, 5)):
        here = open_store(found, run.manifest, stage, heir.identity, EventLog()).load_latest()
        assert here is not None and torch.equal(here.tensors["theta"], run.theta(stage, number))
        assert RecordFiles(found.stage(stage, 3).agreement).read() == {RESTORED_KEY: b"1"}
    opened, told = list[Invite](), list[str]()
    config = CoordinatorConfig(found.path, None, reach=LOCAL, successor=heir)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:

            def watch(event: Event) -> None:
                told.append(event.name)
                if opened and told.count("coordinator_restored") == 3:
                    nursery.cancel_scope.cancel()

            await run_coordinator(config, opened.append, watch)
    assert opened[0].run_id == run.manifest.run_id and "regrouped" not in told


def test_only_the_passphrase_opens_the_file(tmp_path: Path) -> None:
    home = made_home(tmp_path)
    file = tmp_path / "successor.json"
    with pytest.raises(ConfigError, match="8 characters"):
        make_successor(home, file, lambda: "short")
    for poor in (" " * 8, " \t \t \t \t", "aaaaaaaa"):
        with pytest.raises(ConfigError, match="use several words"):
            make_successor(home, file, lambda poor=poor: poor)  # type: ignore[misc]
    assert not file.exists()
    make_successor(home, file, lambda: WORDS)
    with pytest.raises(ConfigError, match="does not open"):
        open_successor(file, "correct horse batterz")
    with pytest.raises(ConfigError, match="exists already"):
        make_successor(home, file, unasked)
    assert open_successor(file, WORDS, ("/ip4/10.0.0.9/tcp/1",)).addresses[0] == "/ip4/10.0.0.9/tcp/1"
    content = msgspec.json.decode(file.read_bytes())
    for name, wrong in (("locked", ""), ("salt", "AA=="), ("barnraise_successor", 2), ("addresses", []), ("more", 1)):
        file.write_bytes(msgspec.json.encode(content | {name: wrong}))
        with pytest.raises(ConfigError, match="does not open" if name == "locked" else "is no successor's file"):
            open_successor(file, WORDS)
    file.write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigError, match="is no successor's file"):
        read_successor(file)
    with pytest.raises(ResourceError, match="cannot be read"):
        read_successor(tmp_path / "none")


def test_a_home_with_another_key_is_left_alone(tmp_path: Path) -> None:
    home = made_home(tmp_path)
    make_successor(home, tmp_path / "file", lambda: WORDS)
    heir = open_successor(tmp_path / "file", WORDS)
    other = Home(tmp_path / "other")
    mine = Identity.load_or_create(other.identity).peer_id
    with pytest.raises(ConfigError, match="a key of its own"):
        enter_home(other, heir)
    assert Identity.load_or_create(other.identity).peer_id == mine
    enter_home(home, heir)
    with pytest.raises(ConfigError, match="not the home of a coordinator"):
        make_successor(guest_home(tmp_path, home), tmp_path / "another", unasked)
    with pytest.raises(ConfigError, match="holds no run"):
        make_successor(Home(tmp_path / "empty"), tmp_path / "another", unasked)


def unasked() -> str:
    pytest.fail("a person has typed a passphrase before the refusal")


def made_home(tmp_path: Path) -> Home:
    """Return the home of a coordinator that has printed an invite."""
    home = Home(tmp_path / "coordinator")
    identity = Identity.load_or_create(home.identity)
    manifest = make_run(identity.peer_id)
    save_run_files(home.path, sign_manifest(identity, manifest), b"")
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{identity.peer_id}"
    home.invite.write_text(str(Invite(manifest.run_id, identity.peer_id, (address,))))
    return home


def guest_home(tmp_path: Path, home: Home) -> Home:
    kept, guest = load_run_files(home.path), Home(tmp_path / "guest")
    assert kept is not None
    save_run_files(guest.path, *kept)
    return guest
