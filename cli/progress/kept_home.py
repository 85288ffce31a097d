"""What a home tells of its run or served model without the network: manifest, last proved heads, losses and events."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from cli.homes import choices_in
from cli.progress.event_tail import events_kept
from cli.progress.losses import Losses
from cli.progress.progress import plain_fields
from peer.catalogue.groups import MemberJoined
from peer.catalogue.reading import Heard, heard
from peer.catalogue.rounds import GossipAlone, HeadAdopted, HeadSeen
from peer.errors import BarnraiseError, ProtocolViolation
from peer.identity import Identity
from peer.plain_text import plain
from swarm.protocol.agreement.proof import ProofChecker
from swarm.protocol.agreement.records import links_in
from swarm.protocol.head import Head
from swarm.protocol.signer import KeySigner
from swarm.rounds.records import RecordFiles
from swarm.run.agreement import agreement_config
from swarm.run.home import Home
from swarm.run.manifest import Manifest
from swarm.run.manifest_transfer import load_manifest
from swarm.status.event_words import log_lines
from swarm.status.state import KeptHead, KeptHome, LossPoint

_LOSSES_SHOWN: Final = 240
_EVENTS_SHOWN: Final = 10
_EVENTS_READ: Final = 200
_NAMES_MAX: Final = 1024
_NAME_CHARS: Final = 64
_HEADS_TRIED: Final = 4


def kept_home(path: Path, run_id: str, now: float) -> KeptHome | None:
    """Return what the home at `path` keeps of that run, at `now`, Unix time. None where it is no home of the run, or
    its manifest cannot be read. Blocks, for some seconds where the log is long."""
    home = Home(path)
    try:
        manifest = load_manifest(path)
        identity = Identity.load_or_create(home.identity) if home.identity.is_file() else Identity.generate()
    except (OSError, BarnraiseError):
        return None
    if manifest is None or manifest.run_id != run_id:
        return None
    log = _Log()
    own = identity.peer_id
    log.names[own] = "the coordinator" if manifest.authority == own else _own_name(path)
    for at, name, fields in events_kept(path):
        log.take(at, name, plain_fields(fields))
    is_run = isinstance(manifest, Manifest)
    heads = tuple(
        _kept(stage, head, log)
        for stage, head in (_heads(home, manifest, identity) if isinstance(manifest, Manifest) else ())
    )
    gossips = isinstance(manifest, Manifest) and not manifest.outer.has_common_state
    return KeptHome(
        kind="run" if is_run else "model",
        run_id=manifest.run_id,
        name=plain(manifest.name, _NAME_CHARS),
        open=manifest.open,
        rounds=manifest.run.rounds if isinstance(manifest, Manifest) else 0,
        at=now,
        written_at=log.last_at,
        in_use=home.is_in_use,
        round=max((head.round for head in heads), default=log.last_round if gossips else None),
        heads=heads,
        losses=log.points,
        log=tuple(replace(line, tellers=()) for line in log_lines({own: log.events}, log.names)[:_EVENTS_SHOWN]),
        names=log.names,
    )


class _Log:
    """What the events of a home add up to."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.events: deque[Heard] = deque(maxlen=_EVENTS_READ)
        self.came: dict[tuple[int, int], float] = {}
        """When each round of a stage came."""
        self.last_at: float | None = None
        self.last_round: int | None = None
        self._losses = Losses()

    def take(self, at: float, name: str, fields: dict[str, object]) -> None:
        if not math.isfinite(at):
            return
        self.last_at = at
        if (found := heard(at, name, fields)) is None:
            return
        event = found.event
        self._losses.take(event)
        if isinstance(event, HeadAdopted | HeadSeen | GossipAlone):
            stage = None if isinstance(event, GossipAlone) else event.stage
            self.came.setdefault((stage or 0, event.round), at)
            self.last_round = event.round
        if isinstance(event, MemberJoined) and len(self.names) < _NAMES_MAX:
            self.names[event.peer] = plain(event.name, _NAME_CHARS)
        if event.sentence("", str):
            self.events.append(found)

    @property
    def points(self) -> tuple[LossPoint, ...]:
        """The losses of the last rounds, and the last held-out loss, however old."""
        train, held_out = self._losses.training, self._losses.held_out
        numbers = sorted(train.keys() | held_out.keys())[-_LOSSES_SHOWN:]
        if held_out and max(held_out) not in numbers:
            numbers.insert(0, max(held_out))
        return tuple(
            LossPoint(round=n, train=train.get(n), peers=int(n in train), held_out=held_out.get(n)) for n in numbers
        )


def _own_name(path: Path) -> str:
    with suppress(BarnraiseError):
        if isinstance(name := choices_in(path).get("name"), str):
            return plain(name, _NAME_CHARS)
    return "this peer"


def _heads(home: Home, manifest: Manifest, identity: Identity) -> list[tuple[int, Head]]:
    """Return each stage's last head that the home's own records prove; none of a stage that the home is not of."""
    found = []
    for stage in range(manifest.stages):
        records = RecordFiles(home.stage(stage, manifest.stages).agreement).read()
        checker = ProofChecker(agreement_config(manifest, stage, identity.peer_id), KeySigner(identity))
        for record in links_in(records)[: -_HEADS_TRIED - 1 : -1]:
            head = record.link.head
            with suppress(ProtocolViolation):
                checker.check(head, checker.prove(records, head.hash))
                found.append((stage, head))
                break
    return found


def _kept(stage: int, head: Head, log: _Log) -> KeptHead:
    return KeptHead(
        stage=stage,
        round=head.round,
        term=head.term,
        head=head.hash.hex(),
        state_hash=head.state_hash.hex(),
        tokens=head.tokens,
        members=tuple(member.peer for member in head.members),
        at=log.came.get((stage, head.round)),
    )
