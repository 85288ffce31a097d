"""A copy of a coordinator's home is started while the first process with its key lives, and after it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from peer.errors import ProtocolViolation, RemoteError, ResourceError
from peer.events import Event, EventLog
from peer.identity import Identity, sign_bytes
from peer.net.host import open_host
from peer.net.reach import LOCAL
from swarm.coordinator.coordinator import CoordinatorConfig, run_coordinator
from swarm.coordinator.second_process import SECOND, SecondStarted, refuse_second, serve_second
from swarm.run.config import parse_run_config
from swarm.run.home import Home
from swarm.run.invite import Invite
from tests.swarm.client.test_download import CUT, patient  # noqa: F401  a fixture that acts by itself


@asynccontextmanager
async def coordinated(home: Path, seen: list[Event], run: str | None = CUT) -> AsyncIterator[Invite]:
    opened = list[Invite]()
    ready = trio.Event()

    def show(invite: Invite) -> None:
        opened.append(invite)
        ready.set()

    config = CoordinatorConfig(home, None if run is None else parse_run_config(run), reach=LOCAL)
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_coordinator, config, show, seen.append)
            await ready.wait()
            yield opened[0]
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_the_second_process_says_so_and_stops_and_the_first_tells_its_operator(tmp_path: Path) -> None:
    first, copy, seen = tmp_path / "first", tmp_path / "a copy", list[Event]()
    async with coordinated(first, seen) as invite:
        shutil.copytree(first, copy)
        at = invite.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ResourceError, match=f"runs with the key of this coordinator, at {at}: stop one"):
            await run_coordinator(CoordinatorConfig(copy, None, reach=LOCAL), lambda invite: None)
        assert [event.fields for event in seen if event.name == "second_process"] == [{"ip": "127.0.0.1"}]
    async with coordinated(copy, seen, run=None) as again:  # what is left of a process that has ended stops none
        assert again.run_id == invite.run_id


async def test_only_a_process_with_the_key_is_believed(tmp_path: Path) -> None:
    seen, identity = list[Event](), Identity.generate()
    log = EventLog(watch=seen.append)
    async with (
        open_host(identity=identity, events=log) as host,
        open_host(identity=Identity.generate(), events=EventLog()) as other,
    ):
        serve_second(host)
        await other.connect_address(host.addresses[0], timeout_s=10)
        forged = sign_bytes(other.identity, "second process", other.peer_id.encode())
        replayed = sign_bytes(identity, "second process", host.peer_id.encode())
        for signature in (forged, replayed):
            with pytest.raises((ProtocolViolation, RemoteError), match="has not this coordinator's key"):
                await other.rpc.call(host.peer_id, SECOND, SecondStarted(signature), timeout_s=10)
    assert not [event for event in seen if event.name == "second_process"]


async def test_a_home_without_a_run_looks_for_none(tmp_path: Path) -> None:
    await refuse_second(Home(tmp_path))
