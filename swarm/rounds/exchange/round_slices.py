"""The slices of one round at one peer, checked against what their contributors have committed to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import fsum, isclose
from typing import Final, NamedTuple, TypeVar

import trio
from blake3 import blake3

from optim.bundles import Bundles, bundle_hash
from optim.strategies.gathered import SQNORM_CLOSE
from optim.strategies.interface import Coding
from peer.errors import ProtocolViolation, ResourceError
from peer.footprint import kept
from swarm.protocol.plan import Contribution

INLINE_BYTES: Final = 1 << 18  # to hash them takes as long as the way to a thread and back
Found = TypeVar("Found")
Spool = Callable[[Sequence[memoryview]], Awaitable[list[memoryview]]]
"""Returns the same bytes as they lie in a file. Raises ResourceError."""


class ReceivedSlice(NamedTuple):
    """Another contributor's slice."""

    hash: bytes
    data: memoryview
    sqnorm: float


class Measured(NamedTuple):
    """The findings of one pass over a slice's bytes."""

    hash: bytes
    sqnorm: float | ProtocolViolation
    """The error of a slice that does not decode."""


class FalseSlice(ProtocolViolation):
    """A slice has the hash that its contributor has committed to, and does not decode or has another norm. A peer that
    passes it on is not to blame."""


def measure(coding: Coding, index: int, data: memoryview) -> Measured:
    """Hash a slice and decode it, in one thread: the second pass finds its bytes in the cache."""
    name = blake3(data).digest()
    try:
        return Measured(name, coding.message_sqnorm(index, data))
    except ProtocolViolation as error:
        return Measured(name, error)


async def off_the_loop(work: Callable[[memoryview], Found], data: memoryview) -> Found:
    """Work on a slice's bytes: on many of them in a thread, since other calls wait for this one."""
    return work(data) if len(data) <= INLINE_BYTES else await trio.to_thread.run_sync(work, data)


@dataclass
class RoundSlices:
    """They outlive an exchange that fails, so that the loss of a member costs only the slices that it owned."""

    received: dict[tuple[int, str], ReceivedSlice] = field(default_factory=dict)
    """Other contributors' slices by (index, peer)."""
    delivered: set[tuple[int, str]] = field(default_factory=set)
    """(index, owner) of own slices that have arrived."""
    listed: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """The hashes of a bundle's slices by that of the bundle, of those with several."""

    def list_own(self, bundles: Bundles, hashes: Sequence[bytes]) -> None:
        """Note the hashes of all slices of this peer's own message."""
        for bundle, name in enumerate(bundles.hashes(hashes)):
            inside = bundles.indices(bundle)
            if len(inside) > 1:
                self.listed[name] = tuple(hashes[inside.start : inside.stop])

    def learn(self, bundles: Bundles, index: int, body: Contribution, hashes: tuple[bytes, ...]) -> None:
        """Note the hashes of a contributor's slices in the bundle of `index`, which its sender has listed. Raise
        `ProtocolViolation` if that is not the list that the contributor has committed to."""
        if self.hash_of(bundles, index, body) is None:
            bundle = bundles.of(index)
            name = body.hashes[bundle]
            if len(hashes) != len(bundles.indices(bundle)) or bundle_hash(hashes) != name:
                raise ProtocolViolation("a slice came with other hashes of its bundle than were committed to")
            self.listed[name] = hashes

    def list_of(self, bundles: Bundles, index: int, body: Contribution) -> tuple[bytes, ...]:
        """Return what goes with a contributor's slice: the hashes in its bundle, if that has several."""
        return self.listed.get(body.hashes[bundles.of(index)], ())

    def hash_of(self, bundles: Bundles, index: int, body: Contribution) -> bytes | None:
        """Return the hash of a contributor's slice; None while only that of its bundle is known."""
        bundle = bundles.of(index)
        name, inside = body.hashes[bundle], bundles.indices(bundle)
        if len(inside) == 1:
            return name
        return self.listed[name][index - inside.start] if name in self.listed else None

    def has(self, bundles: Bundles, index: int, body: Contribution) -> bool:
        """Return whether another contributor's slice is here; an earlier exchange may have left another one."""
        found = self.received.get((index, body.member.peer))
        return found is not None and found.hash == self.hash_of(bundles, index, body)

    def take(self, bundles: Bundles, index: int, body: Contribution, data: memoryview, found: Measured) -> None:
        """Keep a contributor's slice, of which `measure` has found this. Raise `ProtocolViolation` if its hash is not
        the one that the contributor has committed to, `FalseSlice` if only its values or their norm are wrong."""
        name, sqnorm = found
        if name != self.hash_of(bundles, index, body):
            raise ProtocolViolation("a slice differs from the hash its sender committed to")
        bundle, peer = bundles.of(index), body.member.peer
        others = [i for i in bundles.indices(bundle) if i != index]
        here = [self.received[i, peer].sqnorm for i in others if self.has(bundles, i, body)]
        if isinstance(sqnorm, ProtocolViolation):
            raise FalseSlice(str(sqnorm)) from sqnorm
        committed = body.sqnorms[bundle]
        total = fsum([*here, sqnorm])
        below = total <= committed * (1 + SQNORM_CLOSE)  # also refuses NaN
        if not (isclose(total, committed, rel_tol=SQNORM_CLOSE) if len(here) == len(others) else below):
            raise FalseSlice("a slice has another norm than its sender committed to")
        self.received[index, peer] = ReceivedSlice(name, data, sqnorm)

    async def put_away(self, mine: Sequence[memoryview], spool: Spool) -> Sequence[memoryview]:
        """Write the slices that this peer sent and received to a file, and read them from there. Return those that it
        sent. A small exchange stays in memory; so does one where the write fails: the next save reports a full disk."""
        received = list(self.received.items())
        parts = [*mine, *(part.data for _, part in received)]
        if not kept.lies_in_a_file(sum(part.nbytes for part in parts)):
            return mine
        try:
            moved = await spool(parts)
        except ResourceError:
            return mine
        for (key, part), data in zip(received, moved[len(mine) :], strict=True):
            self.received[key] = part._replace(data=data)
        return moved[: len(mine)]
