"""Homes by default, and what a home remembers: `--home` alone continues as a peer was started last."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import trio

from cli.commands.coordinate import coordinate
from cli.commands.join import join
from cli.homes import choices_in, coordinator_home, default_home
from cli.templates import template
from peer.errors import ConfigError, ResourceError
from peer.events import EventLog
from peer.files import write_atomically
from peer.identity import Identity
from swarm.coordinator.coordinator import CoordinatorConfig
from swarm.coordinator.reopen import create_or_reopen
from swarm.run.config import parse_run_config
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import RUN_ID_BYTES, run_id_text
from swarm.run.peer_context import JoinConfig

RUN_ID = run_id_text(bytes(RUN_ID_BYTES))


def invite_at(port: int) -> Invite:
    authority = Identity.generate().peer_id
    return Invite(RUN_ID, authority, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{authority}",))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., JoinConfig]:
    """Returns what `peer join` with these arguments takes part with, as if it did and listened at port 4242."""

    def call(*arguments: object, listening: int = 4242) -> JoinConfig:
        seen: list[JoinConfig] = []

        async def take_part(config: JoinConfig, *others: object) -> None:
            seen.append(config)
            write_atomically(Home(config.home).invite, str(config.invite).encode())
            write_atomically(Home(config.home).choices, config.choices)
            Home(config.home).note_listening([f"/ip4/192.0.2.1/tcp/{listening}/p2p/{config.invite.authority}"])

        monkeypatch.setattr("swarm.training.peer.run_participant", take_part)
        join.main([str(word) for word in arguments], standalone_mode=False)
        return seen[0]

    return call


def test_a_home_alone_continues_as_it_was_started(tmp_path: Path, joined: Callable[..., JoinConfig]) -> None:
    home, data, port = tmp_path / "home", tmp_path / "data", free_port()
    data.mkdir()
    invite = invite_at(1)
    limits = ("--upload-limit", "2.5", "--devices", "cpu:2", "--threads", 2, "--text-field", "body")
    first = joined(invite, "--home", home, "--data", data, "--name", "ann", "--json", *limits, listening=port)
    again = joined("--home", home, listening=port)
    assert again.invite == invite
    assert (again.text.folder, again.name, again.upload_bytes_per_s, again.compute.devices, again.compute.threads) == (
        first.text.folder, "ann", 2.5e6, first.compute.devices, 2,
    )  # fmt: skip
    assert (first.text.field, again.text.field) == ("body", "body")
    assert first.reach.listen == ("/ip4/0.0.0.0/tcp/0",) and again.reach.listen == (f"/ip4/0.0.0.0/tcp/{port}",)
    assert "as_json" not in choices_in(home)
    other = joined("--home", home, "--device", "cpu", "--name", "bo", listening=port)
    assert (other.name, other.compute.device, other.compute.devices, other.text.folder) == ("bo", "cpu", (), str(data))
    assert joined("--home", home).name == "bo", "what is given once more is remembered from then on"
    anew = joined(invite, "--home", home)
    assert (anew.text.folder, anew.compute.devices, anew.text.field) == ("", (), ""), (
        "with the invite only what is given counts"
    )


def test_a_port_that_is_taken_is_left_open_to_a_volunteer(tmp_path: Path, joined: Callable[..., JoinConfig]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        joined(invite_at(1), "--home", tmp_path, listening=taken.getsockname()[1])
        assert joined("--home", tmp_path).reach.listen == ("/ip4/0.0.0.0/tcp/0",)


def test_what_cannot_be_continued_is_told(tmp_path: Path, joined: Callable[..., JoinConfig]) -> None:
    with pytest.raises(click.UsageError, match="Give an INVITE, or the --home"):
        joined()
    with pytest.raises(ConfigError, match="is no peer's home"):
        joined("--home", tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    joined(invite_at(1), "--home", tmp_path / "home", "--data", data)
    data.rmdir()
    with pytest.raises(click.BadParameter, match=r"data' does not exist"):
        joined("--home", tmp_path / "home")
    for damage in (b"{", b'{"name": {}}', b"\xff"):
        Home(tmp_path / "home").choices.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"choices\.json is damaged .*delete it"):
            joined("--home", tmp_path / "home")
    coordinator = Identity.load_or_create(Home(tmp_path / "owner").identity).peer_id
    own = Invite(RUN_ID, coordinator, (f"/ip4/127.0.0.1/tcp/1/p2p/{coordinator}",))
    write_atomically(Home(tmp_path / "owner").invite, str(own).encode())
    with pytest.raises(ConfigError, match="is the coordinator's home"):
        joined("--home", tmp_path / "owner")


@pytest.fixture
def coordinated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CoordinatorConfig]:
    """Returns what `peer coordinate` with these arguments is started with, as if it had listened at `listening`."""

    def call(*arguments: object, listening: int = 4242) -> CoordinatorConfig:
        seen: list[CoordinatorConfig] = []

        async def run(config: CoordinatorConfig, ready: Callable[[Invite], None], watch: Any) -> None:
            seen.append(config)
            Home(config.home).note_listening([f"/ip4/192.0.2.1/tcp/{listening}/p2p/{Identity.generate().peer_id}"])
            ready(invite_at(listening))

        monkeypatch.setattr("swarm.coordinator.coordinator.run_coordinator", run)
        coordinate.main([str(word) for word in arguments], standalone_mode=False)
        return seen[0]

    return call


def test_a_coordinator_keeps_its_addresses(tmp_path: Path, coordinated: Callable[..., CoordinatorConfig]) -> None:
    port, relay, home = free_port(), "/ip4/192.0.2.7/tcp/1/p2p/x", ("--home", tmp_path)
    first = coordinated(*home, "--listen", "/ip4/127.0.0.1/tcp/0", "--relay", relay, listening=port)
    assert first.reach.listen == ("/ip4/127.0.0.1/tcp/0",)
    for _ in range(2):
        again = coordinated(*home, listening=port)
        assert (again.reach.listen, again.reach.relays) == ((f"/ip4/127.0.0.1/tcp/{port}",), (relay,))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ResourceError, match=rf"{port}, which this run's invites name, is taken .*--listen"):
            coordinated(*home)
        moved = coordinated(*home, "--listen", "/ip4/127.0.0.1/tcp/7777", listening=7777)
    assert moved.reach.relays == (relay,)
    assert coordinated(*home, listening=7777).reach.listen == ("/ip4/127.0.0.1/tcp/7777",)
    announced = coordinated(*home, "--announce", "/dns4/a.example/tcp/99", listening=99)
    assert coordinated(*home, listening=99).reach.listen == announced.reach.listen, (
        "an announced port is not the one listened at"
    )


def test_the_port_of_a_home_of_an_earlier_release_is_kept(
    tmp_path: Path, coordinated: Callable[..., CoordinatorConfig]
) -> None:
    port = free_port()
    Home(tmp_path).note_listening([f"/ip4/192.0.2.1/tcp/{port}/p2p/x"])
    assert coordinated("--home", tmp_path).reach.listen == (f"/ip4/0.0.0.0/tcp/{port}",)


async def test_default_homes_are_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    assert coordinator_home() == default_home("coordinator"), "none is there"
    assert coordinator_home("my run / 2") == tmp_path / "coordinator-my-run---2"

    async def create(home: Path) -> None:
        identity = Identity.load_or_create(Home(home).identity)
        await trio.to_thread.run_sync(create_or_reopen, home, parse_run_config(template()), identity, EventLog())

    name = parse_run_config(template()).run.name
    named = coordinator_home(name)
    write_atomically(tmp_path / "coordinator" / "manifest.msgpack", b"damaged")
    assert coordinator_home(name) == named and coordinator_home() == tmp_path / "coordinator"
    (tmp_path / "coordinator" / "manifest.msgpack").unlink()
    await create(named)
    assert coordinator_home() == named
    await create(tmp_path / "coordinator")
    assert coordinator_home(name) == tmp_path / "coordinator", "that of an earlier release is found"
    assert coordinator_home("another") == tmp_path / "coordinator-another"
    with pytest.raises(ConfigError, match="several runs have their coordinator here"):
        coordinator_home()
