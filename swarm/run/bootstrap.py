"""First contact: from an invite to the run files, with the most useful reason if it fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from peer.errors import BarnraiseError, DialError, NetworkError, NotAdmitted, ProtocolViolation, RemoteError
from peer.identity import Signed
from peer.net.host import Host
from swarm.run.gate import Credentials, enter
from swarm.run.invite import Invite
from swarm.run.manifest import AnyManifest, open_manifest
from swarm.run.manifest_transfer import fetch_manifest, fetch_tokenizer, load_run_files, save_run_files

DIAL_S: Final = 8.0
TRIES: Final = 3
PAUSE_S: Final = 2.0


async def fetch_run_files(
    host: Host, invite: Invite, home: Path, open_signed: Callable[[Signed, str], AnyManifest] = open_manifest
) -> tuple[Signed, bytes]:
    """Return the signed manifest and the tokenizer.json: those kept in `home`, or fetched from the invite's addresses.

    Only a training run is accepted; with `open_any_manifest` a served model as well.

    Raises NotAdmitted if the run refuses this peer or `home` belongs to another run, DialError (with the most useful
    reason) if no address answers, ConfigError for a served model where a training run is wanted.
    """
    kept = load_run_files(home)
    if kept is not None:
        try:
            open_signed(kept[0], invite.run_id)
            return kept
        except NotAdmitted as error:
            raise NotAdmitted(f"{home} was used for another run: choose another folder with --home") from error
    failures: list[BarnraiseError] = []
    for attempt in range(TRIES):
        failures = []
        for address in invite.addresses:
            try:
                return await _fetch_from(host, invite, home, address, open_signed)
            except RemoteError as error:
                if error.code == NotAdmitted.__name__:
                    raise NotAdmitted(error.message) from error  # other members would answer the same
                failures.append(error)
            except (NetworkError, ProtocolViolation) as error:
                host.events.emit("contact_failed", address=address, reason=str(error))
                failures.append(error)
        if attempt + 1 < TRIES:
            await trio.sleep(PAUSE_S * (attempt + 1))
    raise _most_useful(failures)


async def _fetch_from(
    host: Host, invite: Invite, home: Path, address: str, open_signed: Callable[[Signed, str], AnyManifest]
) -> tuple[Signed, bytes]:
    peer = await host.connect_address(address, timeout_s=DIAL_S)
    signed = await fetch_manifest(host.rpc, peer, invite.run_id, DIAL_S)
    manifest = open_signed(signed, invite.run_id)
    await enter(host.rpc, peer, Credentials(manifest.run_id, token=invite.token), DIAL_S)
    tokenizer = await fetch_tokenizer(host.rpc, peer, manifest, 60.0)
    save_run_files(home, signed, tokenizer)
    return signed, tokenizer


def _most_useful(failures: list[BarnraiseError]) -> BarnraiseError:
    """Return the error to show: a wrong peer tells more than a refusal, a refusal more than silence."""
    order = ("wrong_peer", "refused", "unreachable", "timeout")
    dials = [error for error in failures if isinstance(error, DialError)]
    others = [error for error in failures if not isinstance(error, DialError)]
    if others:
        return others[0]
    return min(dials, key=lambda error: order.index(error.reason))
