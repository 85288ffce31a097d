"""First contact: from an invite to the run's rules, telling apart why it fails if it does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import trio

from peer.errors import BarnraiseError, DialError, NetworkError, NotAdmitted, ProtocolViolation, RemoteError
from peer.identity import Signed
from peer.net.host import Host
from swarm.run.gate import Credentials, enter
from swarm.run.invite import Invite
from swarm.run.manifest import open_manifest
from swarm.run.manifest_transfer import fetch_manifest, fetch_tokenizer, load_run_files, save_run_files

DIAL_S: Final = 8.0
TRIES: Final = 3
PAUSE_S: Final = 2.0


async def fetch_run_files(host: Host, invite: Invite, home: Path) -> tuple[Signed, bytes]:
    """The run's signed manifest and its tokenizer.json: kept from last time, or fetched from an address of the invite.

    Raises NotAdmitted if the run does not want us, DialError (with the most telling reason) if nobody answers,
    ConfigError if `home` belongs to another run."""
    kept = load_run_files(home)
    if kept is not None:
        try:
            open_manifest(kept[0], invite.run_id)
            return kept
        except NotAdmitted as error:
            raise NotAdmitted(f"{home} was used for another run: choose another folder with --home.") from error
    failures: list[BarnraiseError] = []
    for attempt in range(TRIES):
        failures = []
        for address in invite.addresses:
            try:
                return await _obtain_from(host, invite, home, address)
            except RemoteError as error:
                if error.code == NotAdmitted.__name__:
                    raise NotAdmitted(error.message) from error  # other members would say the same
                failures.append(error)
            except (NetworkError, ProtocolViolation) as error:
                host.events.emit("contact_failed", address=address, reason=str(error))
                failures.append(error)
        if attempt + 1 < TRIES:
            await trio.sleep(PAUSE_S * (attempt + 1))
    raise _most_telling(failures)


async def _obtain_from(host: Host, invite: Invite, home: Path, address: str) -> tuple[Signed, bytes]:
    peer = await host.connect_address(address, timeout_s=DIAL_S)
    signed = await fetch_manifest(host.rpc, peer, invite.run_id, DIAL_S)
    manifest = open_manifest(signed, invite.run_id)
    await enter(host.rpc, peer, Credentials(manifest.run_id, token=invite.token), DIAL_S)
    tokenizer = await fetch_tokenizer(host.rpc, peer, manifest, 60.0)
    save_run_files(home, signed, tokenizer)
    return signed, tokenizer


def _most_telling(failures: list[BarnraiseError]) -> BarnraiseError:
    """A wrong peer says more than a refusal, a refusal more than silence."""
    order = ("wrong_peer", "refused", "unreachable", "timeout")
    dials = [error for error in failures if isinstance(error, DialError)]
    others = [error for error in failures if not isinstance(error, DialError)]
    if others:
        return others[0]
    return min(dials, key=lambda error: order.index(error.reason))
