"""Actions of an agreement node: the outputs of `AgreementNode.step`, to be carried out in order.

A node writes before it sends: while a `Persist` is under way, all later actions but timers and further `Persist`s wait
inside the node for its `Persisted`. So a crash between any two actions loses nothing that was sent.
"""

from __future__ import annotations

import msgspec

from swarm.protocol.agreement.messages import ChainLink, Contradiction, Message
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.head import Head
from swarm.protocol.plan import WorkPlan


class Send(msgspec.Struct, frozen=True):
    """Send a message to a peer, at most once. The node repeats what matters."""

    peer: str
    message: Message


class SetTimer(msgspec.Struct, frozen=True):
    """Fire the timer `id` at time `at` (seconds, as `now`). It replaces a timer of the same id."""

    id: str
    at: float


class CancelTimer(msgspec.Struct, frozen=True):
    """Forget the timer `id`."""

    id: str


class Persist(msgspec.Struct, frozen=True):
    """Put `record` under `key` on disk, replacing the record there; then report `Persisted(id)`. Ids count up, and
    records must reach the disk in that order."""

    id: int
    key: str
    record: bytes
    state: bytes = b""
    """If not empty: before `Persisted`, the disk must also hold the encoded results that lead to the state with this
    hash, from which a new process rebuilds it. It serves them to those that `Build`, since their owners may be gone."""


class Train(msgspec.Struct, frozen=True):
    """Work under this checked plan, then report `Submitted`. A newer plan replaces an older one."""

    plan: WorkPlan
    finish_early: bool = False
    """Stop after the present step and submit the work done so far."""


class StopTraining(msgspec.Struct, frozen=True):
    """Drop the plan and what was computed under it."""

    reason: str


class MergeSlices(msgspec.Struct, frozen=True):
    """Take part in an exchange: send this peer's slices to their owners, merge those that it owns when they are
    complete, and report `SliceResult` for each. Build the next state from the owners' results, and report `Built`. It
    replaces an earlier exchange."""

    roster: OpenedRoster


class Build(msgspec.Struct, frozen=True):
    """Build the next state from the merged slices with these hashes, from their owners or any peer that has them; then
    report `Built`. The committed state stays as it is."""

    name: bytes
    roster: OpenedRoster
    results: tuple[bytes, ...]
    """The hash of each slice's encoded result."""
    holders: tuple[str, ...]
    """Peers that may have the slices: the owners, then voters that have them on disk, then contributors."""


class Fetch(msgspec.Struct, frozen=True):
    """Fetch the state with this hash, which a certified head names, and report `StateFetched`. It replaces an earlier
    `Fetch` of another state. The committed state stays as it is."""

    state_hash: bytes
    head: Head
    holders: tuple[str, ...]


class CommitHead(msgspec.Struct, frozen=True):
    """Make the state of this head the committed one: weights change here and nowhere else. The head's certificate is on
    disk. `StateFetched`, `Built` or `Started` has reported the state before; a coordinator has no weights."""

    head: Head
    certificate: ChainLink
    exchange: bytes
    """The exchange that has led there (`OpenedRoster.key`), where this node knows it; empty where the state was
    fetched."""


class Emit(msgspec.Struct, frozen=True):
    """Emit an event of `peer.events`, by name, for the operator and the logs."""

    event: str
    fields: dict[str, str | int | float | bool | tuple[str, ...]]


class Accuse(msgspec.Struct, frozen=True):
    """A peer has broken the protocol. With `proof` every peer can check it."""

    peer: str
    reason: str
    proof: Contradiction | None = None


Action = (
    Send
    | SetTimer
    | CancelTimer
    | Persist
    | Train
    | StopTraining
    | MergeSlices
    | Build
    | Fetch
    | CommitHead
    | Emit
    | Accuse
)
