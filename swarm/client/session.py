"""Read-only access to a run, without taking part: to look (`peer status`), check (`doctor`) or fetch (`export`).

A client generates its own key, so it never gets in the way of a peer that runs from the same home, and it publishes
nothing. Its credential ends within the hour: it is renewed for as long as the client stays.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import trio

from dht.node import Node, Schema
from peer.errors import ResourceError
from peer.events import EventLog
from peer.files import temporary_folder
from peer.identity import Identity, Signed
from peer.net.host import Host, open_host
from peer.net.reach import LOCAL, Reach
from peer.notifier import ask_at_once, beside_block
from swarm.membership.member_record import MEMBERS, MemberRecord, member_schema
from swarm.membership.membership import read_records
from swarm.membership.open_peer import Schemas, open_peer
from swarm.membership.proven_heads import ASKED_MAX, ProvenHead, ask_proven_heads
from swarm.run.agreement import agreement_config
from swarm.run.bootstrap import EnteredRun, enter_run
from swarm.run.credentials import CLIENT_S, Chain
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import AnyManifest, Manifest, open_any_manifest, training_manifest
from swarm.run.manifest_transfer import MANIFEST_FILE, TOKENIZER_FILE

RENEW_S: Final = CLIENT_S / 3  # what is shown has half of its time left (`Gate`)


@dataclass(frozen=True)
class RunClient:
    """A read-only connection to a training run or a served model."""

    host: Host
    node: Node
    signed: Signed
    """The manifest, as the authority has signed it."""
    manifest: AnyManifest
    tokenizer: bytes
    """The run's tokenizer.json, empty for bytes."""
    trains: bool = False
    """Whether the host's peer trains in the run, so that it is asked as the others are."""

    @property
    def training(self) -> Manifest:
        """The manifest of the training run. Raises ConfigError for a served model."""
        return training_manifest(self.manifest)

    async def members(self) -> dict[str, MemberRecord]:
        """Read the records of the run's peers, by peer id; their addresses go to the host's book."""
        return await read_records(self.node, self.host, MEMBERS, self.manifest.run_id)

    async def candidates(
        self, records: Mapping[str, MemberRecord], stage: int = 0, silent: set[str] | None = None
    ) -> list[ProvenHead]:
        """Return the heads of that stage's group that these peers and the authority prove, best first
        (`swarm.membership.proven_heads`). `silent` gets those that do not answer."""
        manifest = self.training
        ours = [p for p, record in records.items() if manifest.stages == 1 or record.stage == stage]
        asked, most = [manifest.authority, *ours], manifest.run.max_peers + ASKED_MAX
        config = agreement_config(manifest, stage, self.host.peer_id)
        return await ask_proven_heads(self.host, config, asked, most=most, itself=self.trains, silent=silent)

    async def all_candidates(
        self, records: Mapping[str, MemberRecord], silent: set[str] | None = None
    ) -> list[list[ProvenHead]]:
        """Return the `candidates` of each stage, asked for at once."""
        return await ask_at_once(lambda stage: self.candidates(records, stage, silent), range(self.training.stages))


def client_host(reach: Reach) -> AbstractAsyncContextManager[Host]:
    """Return a host to open with a new key, and events that go nowhere."""
    return open_host(Identity.generate(), EventLog(), reach)


def _member_schemas(gate: Gate) -> Sequence[Schema[Any]]:
    return [member_schema(gate)]


@asynccontextmanager
async def open_client(
    invite: Invite,
    home: Path | None = None,
    reach: Reach = LOCAL,
    schemas: Schemas = _member_schemas,
) -> AsyncIterator[RunClient]:
    """Connect to the run inside the block. The manifest and addresses in `home` are used but not changed, so a run
    can be reached although every address of the invite is gone. `reach`: how peers dial it; `schemas`: of the records
    to read.

    Raises NotAdmitted, DialError if no peer answers, or ResourceError if `home` cannot be read or TMPDIR not written.
    """
    with temporary_folder("barnraise-client-") as folder:
        own = Home(folder)
        if home is not None:
            _copy_run_files(home, own)

        async def enter(host: Host) -> EnteredRun[AnyManifest]:
            owner = _owner(home)

            def sign(now: float) -> Chain:
                return invite.client_chain(host.peer_id, owner, now)

            return await enter_run(host, invite, own, sign(time.time()), open_any_manifest, sign)

        opening = client_host(replace(reach, bootstrap=invite.addresses))
        async with open_peer(opening, own, enter, schemas, is_client=True) as peer, _renewing(peer.run.gate):
            yield RunClient(peer.host, peer.node, peer.run.signed, peer.run.manifest, peer.run.tokenizer)


@asynccontextmanager
async def _renewing(gate: Gate) -> AsyncIterator[None]:
    """Renew at all connected peers, inside the block, what makes this peer a client."""

    async def renew() -> None:
        while True:
            await trio.sleep(RENEW_S)
            await gate.renew()

    async with beside_block() as nursery:
        nursery.start_soon(renew)
        yield


def _owner(home: Path | None) -> Identity | None:
    """Return the identity of the peer whose home this is, if there is one."""
    if home is None or not Home(home).identity.exists():
        return None
    return Identity.load_or_create(Home(home).identity)


def _copy_run_files(home: Path, own: Home) -> None:
    """Copy the run files and addresses that `home` has."""
    for name in (MANIFEST_FILE, TOKENIZER_FILE, own.addresses.name):
        try:
            shutil.copy(home / name, own.path / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ResourceError(
                f"{home / name} cannot be copied to {own.path} ({error.strerror}): check its permissions and free space"
            ) from error
