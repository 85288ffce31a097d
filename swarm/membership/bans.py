"""The authority's ban list: a file in its home, sent to every member once, and passed on with introductions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.decoding import MALFORMED, told
from peer.errors import BarnraiseError, CheckpointError, ConfigError, ProtocolViolation
from peer.events import EventLog
from peer.files import write_atomically
from peer.identity import Identity, Signed, is_peer_id
from swarm.membership.member_record import MemberRecord
from swarm.run.ban_list import BANS_MAX, BanList, open_bans, sign_bans
from swarm.run.gate import Gate
from swarm.run.manifest import Manifest

SPREAD_EVERY_S: Final = 2.5
TELL_S: Final = 5.0
NOTHING: Final[Mapping[bytes, frozenset[bytes]]] = {}


def extend_bans(
    path: Path,
    authority: Identity,
    manifest: Manifest,
    banned: Iterable[str],
    withdrawn: Mapping[bytes, frozenset[bytes]] = NOTHING,
) -> Signed | None:
    """Add the peers `banned` to the list at `path`, and the keys `withdrawn`: of the guests that came by one, or by a
    banned peer, those with the public keys there stay. Returns the list, None if it is empty.

    Raises ConfigError for what is no peer id, CheckpointError if the file is damaged.
    """
    saved = _load(path, manifest)
    wanted = frozenset(banned)
    for peer in wanted:
        if not is_peer_id(peer):
            raise ConfigError(f"--ban {peer} is no peer id: `peer status INVITE --json` lists them")
        if peer == authority.peer_id:
            raise ConfigError("--ban names this coordinator itself: name another peer")
    known = BanList(manifest.run_id, 0) if saved is None else open_bans(saved, manifest)
    closed = {**known.withdrawn, **withdrawn}
    if wanted <= known.peers and closed == known.withdrawn:
        return saved
    bans = BanList(manifest.run_id, time.time_ns(), known.peers | wanted, closed)
    if bans.entries > BANS_MAX:
        raise ConfigError(f"the ban list would have {bans.entries} entries, at most {BANS_MAX}: create a new run")
    signed = sign_bans(authority, bans)
    write_atomically(path, msgspec.msgpack.encode(signed))
    return signed


def banned_in(path: Path, manifest: Manifest) -> frozenset[str]:
    """Return the peers that the list at `path` bans. Raises CheckpointError if the file is damaged."""
    saved = _load(path, manifest)
    return frozenset() if saved is None else open_bans(saved, manifest).peers


async def spread_bans(gate: Gate, view: Callable[[], Mapping[str, MemberRecord]], own: str, events: EventLog) -> None:
    """Send the gate's list, and every later one, to every member in `view()`, once a session, until cancelled."""
    informed: set[tuple[str, str]] = set()
    sent = gate.bans
    while True:
        if gate.bans != sent:
            informed, sent = set(), gate.bans
        for peer, record in list(view().items()):
            session = (peer, record.session)
            if peer == own or session in informed or (gate.bans is not None and peer in gate.bans.peers):
                continue
            try:
                await gate.introduce(peer, TELL_S)
                informed.add(session)
            except BarnraiseError as error:
                events.emit("bans_untold", peer=peer, reason=str(error))
        await trio.sleep(SPREAD_EVERY_S)


def _load(path: Path, manifest: Manifest) -> Signed | None:
    try:
        signed = msgspec.msgpack.decode(path.read_bytes(), type=Signed)
        open_bans(signed, manifest)
    except FileNotFoundError:
        return None
    except (OSError, ProtocolViolation, *MALFORMED) as error:
        raise CheckpointError(f"{path} is damaged ({told(error)}): delete it, and repeat --ban") from error
    return signed
