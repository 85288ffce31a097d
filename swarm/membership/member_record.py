"""The record that a peer of a training run publishes of itself.

Joiners find the group through these records, `peer status` and the monitor read them. They are for display, routing and
placement; no round trusts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol, TypeVar

import msgspec

from dht.records import Schema, UnvouchedRecord
from peer.bounds import HASH_BYTES, Hash, Loss, UnixTime, finite_loss
from peer.errors import NotAdmitted
from peer.net.address_book import is_circuit
from swarm.protocol.head import Head
from swarm.rounds.trainers.trained_rounds import TrainedRounds
from swarm.run.credentials import Chain
from swarm.run.gate import Gate
from swarm.run.sections import STAGES_MAX

if TYPE_CHECKING:
    from peer.net.host import Host

NAME_CHARS_MAX: Final = 64
ADDRESSES_MAX: Final = 8
ADDRESSES_CHARS: Final = 380  # together, of which relayed ones get at least half if there are any
RECORD_BYTES_MAX: Final = 1056
CREDENTIAL_BYTES_MAX: Final = 700
STEPS_MAX: Final = (1 << 16) - 1  # of a round, more of which need not be told

Text = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Address = Annotated[str, msgspec.Meta(max_length=256)]
Round = Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)]
Total = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Stage = Annotated[int, msgspec.Meta(ge=-1, lt=STAGES_MAX)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]  # no NaN, no infinity: others compute with it
Steps = Annotated[int, msgspec.Meta(ge=0, le=STEPS_MAX)]
MemberRole = Literal["full", "stage", "feeder", "coordinator"]


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One peer as it describes itself. Times are seconds since the Unix epoch.

    From `stage` on the fields are those of a pipeline, 0 or -1 while not known.
    """

    session: Text
    name: Text
    role: MemberRole
    version: Text
    addresses: Annotated[list[Address], msgspec.Meta(max_length=ADDRESSES_MAX)]
    term: Round
    round: Round
    head: Hash
    """Empty before the first head, as `state_hash`."""
    state_hash: Hash
    members: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    phase: Text
    speed: Amount
    """Inner steps a second."""
    loss: Loss | None
    val_loss: Loss | None
    tokens: Total
    bytes_up: Total
    """Since the peer started, as `bytes_down`."""
    bytes_down: Total
    joined_at: UnixTime
    at: UnixTime
    """When the record was made."""
    stage: Stage = -1
    """Where the peer is or, while `ready_at` lies ahead, where it is going; -1 also for feeders and the coordinator."""
    source: Stage = -1
    """The stage that the peer came from."""
    queue: Amount = 0.0
    """Micro-batches that wait for the peer."""
    service_s: Amount = 0.0
    """Seconds of the peer's own work on one micro-batch, smoothed."""
    rate: Amount = 0.0
    """Micro-batches a second that were recently counted there."""
    download_bytes_s: Amount = 0.0
    """Measured."""
    memory_bytes: Amount = 0.0
    """The memory that the peer has for a stage."""
    since: Amount = 0.0
    """When the peer chose `stage`."""
    ready_at: Amount = 0.0
    """When the peer expects to be at work there."""
    has_text: bool = True
    """Whether the peer has the run's text, which the first stage needs."""
    pinned: bool = False
    """Whether the user chose the stage: then the peer does not move."""
    steps: Steps = 0
    """Inner steps of the last round that the peer has trained, those that were skipped included."""
    skipped: Steps = 0
    """Of these the ones whose loss or gradient was NaN or infinite: they have changed nothing."""
    val_round: Round = -1
    """The round of `val_loss`: most rounds are not measured. -1: not reported."""
    client: bool = False
    """Whether no other peer can dial this one, so that it merges nothing."""
    credential: Chain = ()
    """In a closed run, what makes the peer a member."""

    def __post_init__(self) -> None:
        """Check what types cannot express: texts are for display, and a hash is whole or absent."""
        for text in (self.session, self.name, self.version, self.phase, *self.addresses):
            if not text.isprintable():
                raise ValueError(
                    f"a member record with the text {text!a} is not printable: leave out control characters"
                )
        for digest in (self.head, self.state_hash):
            if len(digest) not in (0, HASH_BYTES):
                raise ValueError(f"a hash of {len(digest)} bytes is none: give {HASH_BYTES} bytes, or none")

    def moving(self, now: float) -> bool:
        """Whether the peer is still on its way to its stage."""
        return self.stage >= 0 and self.ready_at > now


MEMBERS: Final = Schema[MemberRecord](
    name="member",
    type=MemberRecord,
    ttl_max_s=60.0,
    size_max=RECORD_BYTES_MAX + CREDENTIAL_BYTES_MAX,
    signer=lambda key, peer: True,
    keys=lambda namespace, key: key == namespace,  # the run's id
)


def member_schema(gate: Gate) -> Schema[MemberRecord]:
    """Return the schema of the run that `gate` guards."""
    return vouched(MEMBERS, gate)


class _Credited(Protocol):
    @property
    def credential(self) -> Chain: ...


CreditedT = TypeVar("CreditedT", bound=_Credited)


def vouched(schema: Schema[CreditedT], gate: Gate) -> Schema[CreditedT]:
    """Return a schema for what `gate` guards: of a peer that is no member, or is banned, no record is kept."""

    def check(peer: str, record: CreditedT) -> None:
        try:
            gate.vouch(peer, record.credential)
        except NotAdmitted as error:
            raise UnvouchedRecord(f"a record of {peer} is not believed: {error}") from error

    return replace(schema, check=check, scarce=gate.closed)


MemberView = Callable[[], Mapping[str, MemberRecord]]
"""Returns the records of the other peers in the run, by peer id."""


@cache
def installed_version() -> str:
    """Return the version of this software, or "source" if it is not installed."""
    try:
        return version("barnraise")
    except PackageNotFoundError:
        return "source"


def member_record(
    host: Host, head: Head, *, session: str, name: str, role: MemberRole, phase: str, joined_at: float
) -> MemberRecord:
    """Return the present record of a peer at `head`; the caller fills in its measurements."""
    return MemberRecord(
        session=session,
        name="".join(letter if letter.isprintable() else "?" for letter in name[:NAME_CHARS_MAX]),
        role=role,
        version=installed_version(),
        addresses=short_addresses(host.addresses, host.peer_id),
        term=head.term,
        round=head.round,
        head=head.hash,
        state_hash=head.state_hash,
        members=len(head.members),
        phase=phase[:NAME_CHARS_MAX],
        speed=0.0,
        loss=None,
        val_loss=None,
        tokens=head.tokens,
        bytes_up=host.bytes_up,
        bytes_down=host.bytes_down,
        joined_at=joined_at,
        at=time.time(),
        client=host.traversal.is_client,
    )


class _Measured(Protocol):
    """Figures of a peer's own training, from `swarm.rounds.trainers.upkeep.ReplicaTrainer`."""

    speed: float
    trained: TrainedRounds
    val_loss: float | None
    val_round: int


def measured_record(record: MemberRecord, trainer: _Measured) -> MemberRecord:
    """Return the record with what the peer's trainer has measured."""
    last = trainer.trained.last
    return msgspec.structs.replace(
        record,
        speed=trainer.speed,
        loss=last.loss,
        val_loss=finite_loss(trainer.val_loss),
        val_round=trainer.val_round,
        steps=min(last.steps, STEPS_MAX),
        skipped=min(last.skipped, STEPS_MAX),
    )


def short_addresses(addresses: Sequence[str], peer: str) -> list[str]:
    """Return addresses without the peer's id, as many as a record has room for: direct ones first."""
    bare = [address.removesuffix(f"/p2p/{peer}") for address in addresses]
    relayed = [address for address in bare if is_circuit(address)]
    kept: list[str] = []
    for address in bare:
        held_back = 0 if is_circuit(address) else len(relayed[:2])  # places for relayed ones
        room = ADDRESSES_CHARS // 2 if held_back else ADDRESSES_CHARS
        if sum(map(len, kept)) + len(address) <= room and len(kept) < ADDRESSES_MAX - held_back:
            kept.append(address)
    return kept
