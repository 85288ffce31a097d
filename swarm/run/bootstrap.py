"""First contact: from an invite to the run files and an open gate, with the most useful reason if it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import trio

from peer.catalogue.machine import ContactFailed
from peer.errors import BarnraiseError, DialError, DialReason, NetworkError, NotAdmitted, ProtocolViolation, RemoteError
from peer.identity import Signed
from peer.net.host import Host
from swarm.run.credentials import Chain
from swarm.run.gate import Gate, RenewChain
from swarm.run.guests import GuestBook
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import AnyManifest
from swarm.run.manifest_transfer import fetch_manifest, fetch_tokenizer, load_run_files, save_run_files

DIAL_S: Final = 8.0
TRIES: Final = 3
PAUSE_S: Final = 2.0
_REMEDIES: Final[dict[DialReason, str]] = {
    "wrong_peer": "ask for a new invite, as that address is another peer's now",
    "refused": "try again in a minute, as nothing listens there now",
    "timeout": "check that this machine's firewall lets it out, and try again",
    "unreachable": "check this machine's network",
}
"""Advice to the reader of an invite."""
ASK_SENDER: Final = (
    "ask who sent the invite whether its coordinator or a member runs, or for the invite of a member that does"
    " (`peer invite`)"
)
TELLING: Final[tuple[DialReason, ...]] = ("wrong_peer", "refused", "unreachable", "timeout")
"""Why a dial failed, what explains most first."""

ManifestT = TypeVar("ManifestT", bound=AnyManifest)


@dataclass(frozen=True)
class EnteredRun(Generic[ManifestT]):
    """The rules of a run and the gate that guards a host for it."""

    signed: Signed
    manifest: ManifestT
    tokenizer: bytes
    """The tokenizer.json, empty for bytes."""
    gate: Gate


async def enter_run(
    host: Host,
    invite: Invite,
    home: Home,
    chain: Chain,
    open_signed: Callable[[Signed, str], ManifestT],
    renew: RenewChain | None = None,
    found: Callable[[], Iterable[str]] = tuple,
) -> EnteredRun[ManifestT]:
    """Guard `host` for the run of `invite`, with the run files kept in `home` or fetched from the invite's addresses.

    `chain` is what this peer shows, and `renew` signs it again (`Gate`). `open_signed` checks the manifest
    (`open_manifest`, `open_any_manifest`). `found` returns peers that are connected and know the run's id: they are
    asked first, and what they refuse is not the run's word.

    Raises NotAdmitted if the run refuses this peer or `home` belongs to another run, DialError (with the most useful
    reason) if no address answers, and what `open_signed` raises.
    """
    host.admissions.guard()  # also before there is a gate: the peers that we ask may call us, too
    host.admissions.trust("invite", [address.rpartition("/p2p/")[2] for address in invite.addresses])
    kept = load_run_files(home.path)
    if kept is not None:
        try:
            manifest = open_signed(kept[0], invite.run_id)
        except NotAdmitted as error:
            raise NotAdmitted(f"{home.path} was used for another run: choose another folder with --home") from error
        return EnteredRun(kept[0], manifest, kept[1], _gate(host, manifest, home, chain, renew))
    gate: Gate | None = None  # made once, with the manifest of the first peer that answers

    async def enter_with(peer: str) -> EnteredRun[ManifestT]:
        nonlocal gate
        signed = await fetch_manifest(host.rpc, peer, invite.run_id, DIAL_S)
        manifest = open_signed(signed, invite.run_id)
        gate = gate or _gate(host, manifest, home, chain, renew)
        await gate.introduce(peer, DIAL_S)
        tokenizer = await fetch_tokenizer(host.rpc, peer, manifest, 60.0)
        save_run_files(home.path, signed, tokenizer)
        return EnteredRun(signed, manifest, tokenizer, gate)

    failures: list[BarnraiseError] = []
    for attempt in range(TRIES):
        failures = []
        for peer in found():
            try:
                return await enter_with(peer)
            except (NetworkError, ProtocolViolation) as error:
                host.events.emit(ContactFailed(address=peer, reason=str(error)))
        for address in invite.addresses:
            try:
                return await enter_with(await host.connect_address(address, timeout_s=DIAL_S))
            except (NetworkError, ProtocolViolation) as error:
                host.events.emit(ContactFailed(address=address, reason=str(error)))
                refused = isinstance(error, RemoteError) and error.code == NotAdmitted.__name__
                failures.append(NotAdmitted(f"the peer at {address} refuses: {error}") if refused else error)
                if refused and address.endswith(f"/p2p/{invite.authority}"):
                    raise failures[-1] from error  # another peer's word is not the run's
        if all(isinstance(failure, NotAdmitted) for failure in failures):
            break
        if attempt + 1 < TRIES:
            await trio.sleep(PAUSE_S * (attempt + 1))
    raise _most_useful(failures)


def _gate(host: Host, manifest: AnyManifest, home: Home, chain: Chain, renew: RenewChain | None) -> Gate:
    return Gate(host.rpc, manifest, host.identity, chain, GuestBook(home.guests), renew=renew)


def _most_useful(failures: list[BarnraiseError]) -> BarnraiseError:
    """Return the error to show: a wrong peer explains more than a closed port, and that more than silence."""
    dials = [error for error in failures if isinstance(error, DialError)]
    others = [error for error in failures if not isinstance(error, DialError)]
    if others:
        return next((error for error in others if isinstance(error, NotAdmitted)), others[0])
    first = min(dials, key=lambda error: TELLING.index(error.reason))
    which = "the address" if len(dials) == 1 else f"any of the {len(dials)} addresses"
    what, _, _ = str(first).rpartition(": ")
    return DialError(
        f"no peer of the run answers at {which} of the invite ({what}): {_REMEDIES[first.reason]}; if that does not"
        f" help, {ASK_SENDER}",
        first.reason,
    )
