"""A visit to a run without taking part in it: to look (`peer status`), check (`doctor`) or fetch (`export`).

A visitor has a key of its own for the length of the visit, so that it never gets in the way of a peer that runs from
the same home, and it publishes nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from dht.node import Node, NodeConfig, open_node
from peer.errors import ConfigError, ResourceError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, HostConfig, open_host
from peer.temp_folder import temporary_folder
from swarm.membership.membership import MEMBERS, MemberRecord
from swarm.protocol.head import Member
from swarm.protocol.quorum import ASKED_MAX, HeadCandidate, Viewpoint, ask_head_reports, weigh
from swarm.run.bootstrap import fetch_run_files
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import MANIFEST_FILE, TOKENIZER_FILE


@dataclass(frozen=True)
class DialBackConfig:
    """Where a visitor can be reached, for visits that are about just that. Multiaddrs, as in `HostConfig`."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()

    def config(self) -> HostConfig:
        """A host with these addresses, a key of its own, and nobody who listens to its events."""
        return HostConfig(
            identity=Identity.generate(),
            events=EventLog(),
            listen=self.listen,
            announce=self.announce,
            relays=self.relays,
        )


_QUIET: Final = DialBackConfig()


@dataclass(frozen=True)
class RunClient:
    """Somebody who is in touch with a run. `tokenizer` is the run's tokenizer.json, empty for bytes."""

    host: Host
    node: Node
    manifest: Manifest
    tokenizer: bytes

    async def members(self) -> dict[str, MemberRecord]:
        """What the peers of the run publish of themselves, by peer id; their addresses go to the host's book."""
        entries = await self.node.get(MEMBERS, self.manifest.run_id)
        records = {peer: entry.value for peer, entry in entries.items()}
        for peer, record in records.items():
            self.host.book.add(peer, record.addresses)
        return records

    async def candidates(self, records: Mapping[str, MemberRecord], stage: int = 0) -> list[HeadCandidate]:
        """The heads of that stage's group that count among these peers, best first (`swarm.protocol.quorum`)."""
        manifest = self.manifest
        ours = [p for p, record in records.items() if manifest.stages == 1 or record.stage == stage]
        asked = ours if manifest.stages == 1 else [manifest.authority, *ours]
        start = manifest.first_head(stage)
        most = manifest.run.max_peers + ASKED_MAX
        head_reports = await ask_head_reports(self.host.rpc, asked, group=start.run_id, most=most)
        return weigh(head_reports, manifest.authority, start, Viewpoint(Member(self.host.peer_id, ""), start))

    async def all_candidates(self, records: Mapping[str, MemberRecord]) -> list[list[HeadCandidate]]:
        """The `candidates` of each stage, asked for at once."""
        found: list[list[HeadCandidate]] = [[] for _ in range(self.manifest.stages)]

        async def look(stage: int) -> None:
            found[stage] = await self.candidates(records, stage)

        async with trio.open_nursery() as nursery:
            for stage in range(self.manifest.stages):
                nursery.start_soon(look, stage)
        return found


def read_kept_invite(home: Path) -> Invite:
    """The invite that the peer of `home` keeps. ConfigError if there is none."""
    path = Home(home).invite
    try:
        return Invite.parse(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{home} is no peer's home: give the --home of `peer join` or `peer coordinate`.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check who owns it.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: give the INVITE itself in place of --home.") from error


@asynccontextmanager
async def visit(
    invite: Invite, home: Path | None = None, dial_back_config: DialBackConfig = _QUIET
) -> AsyncIterator[RunClient]:
    """Be in touch with the run inside the block. What `home` remembers (rules, addresses) is used but not changed, so a
    run can be visited although every address of the invite is gone.

    Raises NotAdmitted, DialError if nobody answers, or ResourceError if `home` cannot be read or TMPDIR not written.
    """
    with temporary_folder("barnraise-visit-") as folder:
        own = Home(folder)
        if home is not None:
            _copy_memory(home, own)
        async with open_host(dial_back_config.config()) as host:
            signed, tokenizer = await fetch_run_files(host, invite, own.path)
            manifest = open_manifest(signed, invite.run_id)
            Gate(host.rpc, manifest, invite.token)
            config = NodeConfig(manifest.run_id, invite.addresses, own.addresses, required=True)
            async with open_node(host, config, [MEMBERS]) as node:
                yield RunClient(host, node, manifest, tokenizer)


def _copy_memory(home: Path, own: Home) -> None:
    """Rules and addresses, as far as `home` has them."""
    for name in (MANIFEST_FILE, TOKENIZER_FILE, own.addresses.name):
        try:
            shutil.copy(home / name, own.path / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ResourceError(
                f"{home / name} cannot be copied to {own.path} ({error.strerror}): check who owns it, and free space."
            ) from error
