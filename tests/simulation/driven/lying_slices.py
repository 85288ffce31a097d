"""Members whose real driver lies about slices: each changes one thing of what the driver signs, sends or answers.

Some lies are accepted by design:

- The norm of a slice is checked by its owner only, so no peer checks that of a slice that its contributor owns itself.
  It moves the bound of `Coding.check_result` for that slice; whether the result is the merge, an audit tells.
- A false result of a possible norm is committed, and stays. Audits find it and leave out its owner (`FalseOwner`).
  An owner that merged its own update can keep that from an audit, which then proves nothing: it is left out by a member
  after `UNSHOWN_MAX` such audits in a row (`FalseShow`).
- The bytes of a result that one peer gets are no word of its owner: the hash that it has signed is, and those that have
  other bytes fetch them elsewhere. Nothing shows who has changed them (`TwoFacedOwner`, on whom no peer tells).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3
from msgspec.structs import replace

from peer.net.method import Method
from swarm.protocol.messages import CONTRIBUTION, FETCH_RESULT, RELAY, RESULT, SHOW, SliceOf
from swarm.protocol.plan import Contribution

if TYPE_CHECKING:
    from tests.simulation.driven.world import DrivenWorld

OFTEN: Final = 0.75  # of the contributions
SELDOM: Final = 0.3  # of the slices and results, of which a round has several: some rounds have no lie
CONTRIBUTED: Final = {CONTRIBUTION.name, RELAY.name}
REFUSED: Final = {"ProtocolViolation", "FalseSlice"}
"""The codes of refusals that name the caller; others say that a slice comes late, or again."""


class SliceLiar:
    """A member that says what its driver says; the lies change one thing each."""

    def __init__(self, world: DrivenWorld, peer: str, random: Random) -> None:
        self.peer, self.name = peer, type(self).__name__
        self.altered: set[tuple[str, bytes, bytes]] = set()
        """Calls (method, body, payload) that say something else than the driver's."""
        self.false_norms: set[tuple[bytes, int, float]] = set()
        """(hash of the plan, bundle, norm) of norms that are not those of the slices. A member that starts again signs
        another contribution to the same plan, which may be false elsewhere."""
        self.impossible: set[bytes] = set()
        """The hashes of results of a norm that no merge has."""
        self.told_on_by: set[str] = set()
        """The honest peers that have penalized this one."""
        self._world, self._random = world, random
        self._chosen: dict[tuple[Any, ...], bool] = {}

    # -- what a lie changes --------------------------------------------------------------------------------------------

    def contribution(self, body: Contribution) -> Contribution:
        """Return what is signed."""
        return body

    def slice(self, named: SliceOf, payload: bytes, mine: Sequence[memoryview]) -> tuple[SliceOf, bytes]:
        """Return what is sent as a contributor's slice. `mine`: this peer's own."""
        return named, payload

    def result(self, key: bytes, index: int, merged: bytes) -> bytes:
        """Return an owner's result."""
        return merged

    def sent_result(self, target: str, named: SliceOf, merged: bytes) -> bytes:
        """Return what one peer gets as that result."""
        return merged

    def shown(self, named: SliceOf, payload: bytes) -> bytes:
        """Return what an audit is shown."""
        return payload

    # -- where the driver meets its network ----------------------------------------------------------------------------

    def calls(
        self, target: str, method: Method[Any, Any], body: Any, payload: bytes, mine: Sequence[memoryview]
    ) -> tuple[Any, bytes]:
        """Return what goes to a peer in place of a call."""
        if method.name in CONTRIBUTED:
            return self.slice(body, payload, mine)
        return (body, self.sent_result(target, body, payload)) if method is RESULT else (body, payload)

    def note_call(self, method: Method[Any, Any], encoded: bytes, payload: bytes) -> None:
        """Note a contributor's slice that was changed."""
        if method.name in CONTRIBUTED:
            self.altered.add((method.name, encoded, payload))

    def answers(self, caller: str, method: Method[Any, Any], body: Any, payload: bytes) -> bytes:
        """Return the payload of an answer."""
        if method is FETCH_RESULT and payload:
            return self.sent_result(caller, body, payload)
        return self.shown(body, payload) if method is SHOW and payload else payload

    # -- helpers -------------------------------------------------------------------------------------------------------

    def lies(self, *about: Any, share: float = SELDOM) -> bool:
        """Return whether to lie about this: always the same, however often it is sent."""
        if about not in self._chosen:
            self._chosen[about] = self._random.random() < share
        return self._chosen[about]

    def tell(self) -> None:
        """Count a lie that is told. Of the core's lies one has the same name."""
        self._world.covered[f"slice lie {self.name}"] += 1


class OtherNorm(SliceLiar):
    """Commits to another norm of one bundle than its slices have."""

    def contribution(self, body: Contribution) -> Contribution:
        if not body.sqnorms or not self.lies(body.plan, share=OFTEN):
            return body
        self.tell()
        bundle, factor = self._random.randrange(len(body.sqnorms)), self._random.choice((0.25, 4.0))
        norms = list(body.sqnorms)
        norms[bundle] *= factor
        self.false_norms.add((body.plan, bundle, norms[bundle]))
        return replace(body, sqnorms=tuple(norms))


class TooFew(SliceLiar):
    """Commits to fewer hashes or norms than there are bundles."""

    def contribution(self, body: Contribution) -> Contribution:
        if not body.hashes or not self.lies(body.plan, share=OFTEN):
            return body
        self.tell()
        if self._random.random() < 0.5:
            return replace(body, hashes=body.hashes[:-1])
        return replace(body, sqnorms=body.sqnorms[:-1])


class OtherBytes(SliceLiar):
    """Sends other bytes than those of the hash, of its own slices and of those that it passes on."""

    def slice(self, named: SliceOf, payload: bytes, mine: Sequence[memoryview]) -> tuple[SliceOf, bytes]:
        if not self.lies(named.key, named.index):
            return named, payload
        self.tell()
        return named, bytes([payload[0] ^ 1]) + payload[1:]


class OtherLeaf(SliceLiar):
    """Sends the next slice in the place of one, in a bundle with the list of hashes that this would need, or not."""

    def slice(self, named: SliceOf, payload: bytes, mine: Sequence[memoryview]) -> tuple[SliceOf, bytes]:
        if not mine or not self.lies(named.key, named.index):
            return named, payload
        self.tell()
        hashes = named.hashes[::-1] if self.lies("list", named.key, named.index, share=0.5) else named.hashes
        return replace(named, hashes=hashes), bytes(mine[named.index ^ 1])  # in a bundle of two: the other one


class TooShort(SliceLiar):
    """Sends the beginning of a slice, or nothing of it."""

    def slice(self, named: SliceOf, payload: bytes, mine: Sequence[memoryview]) -> tuple[SliceOf, bytes]:
        if not self.lies(named.key, named.index):
            return named, payload
        self.tell()
        return named, payload[: len(payload) // 2] if self.lies("half", named.key, named.index, share=0.5) else b""


class FalseOwner(SliceLiar):
    """Merges a result of the same norm that points the other way, the same for all."""

    def result(self, key: bytes, index: int, merged: bytes) -> bytes:
        if not self.lies(key, index):
            return merged
        self.tell()
        return _opposite(merged)


class FalseShow(FalseOwner):
    """Does so, and shows audits other slices than those that went into it, its own among them."""

    def shown(self, named: SliceOf, payload: bytes) -> bytes:
        return _opposite(payload)


class LargeResult(SliceLiar):
    """Merges a result that is larger than any merge."""

    def result(self, key: bytes, index: int, merged: bytes) -> bytes:
        if not self.lies(key, index):
            return merged
        self.tell()
        large = b"\x00\x7e" * (len(merged) // 2)  # about 4e37 each, in bf16
        self.impossible.add(blake3(large).digest())
        return large


class TwoFacedOwner(SliceLiar):
    """Sends some peers another result than the one that it signs, also when they ask for it."""

    def sent_result(self, target: str, named: SliceOf, merged: bytes) -> bytes:
        if not self.lies(named.key, named.index, target):
            return merged
        self.tell()
        return _opposite(merged)


SLICE_LIES: Final[dict[str, type[SliceLiar]]] = {
    kind.__name__: kind
    for kind in (
        OtherNorm, TooFew, OtherBytes, OtherLeaf, TooShort, FalseOwner, FalseShow, LargeResult, TwoFacedOwner,
    )
}  # fmt: skip
TOLD_ON: Final = tuple(name for name in SLICE_LIES if name != "TwoFacedOwner")
"""Lies for which honest peers penalize the liar."""


def draw(world: DrivenWorld, peer: str, random: Random) -> SliceLiar:
    """Choose a peer's lie: seeds in a row have all of them."""
    lies = tuple(SLICE_LIES)
    return SLICE_LIES[lies[world.seed % len(lies)]](world, peer, random)


def _opposite(encoded: bytes) -> bytes:
    """Return bf16 values with the other sign."""
    return bytes(byte ^ 0x80 * (at % 2) for at, byte in enumerate(encoded))
