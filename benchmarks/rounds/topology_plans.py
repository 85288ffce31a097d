"""How updates may travel between the n peers of a round: each topology's plan of transfers, and its bytes by formula.

    server      all slices have one owner: peer 0 receives all updates and sends the sum to all
    naive       every peer sends its update to every other one
    ring        reduce-scatter, then all-gather, between neighbours: 2 (n - 1) steps
    halving     recursive halving, then doubling: 2 log2(n) steps; surplus peers fold in first and out last, as in MPI
    butterfly   every peer owns as many slices: their sum is made there and sent to all
    by link     a butterfly with the shares of the product's rule (`swarm.protocol.shares`)

All peers make the same plan from the same arguments. In it M is the bytes of an update, which are as many as those of
the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from swarm.protocol.shares import deal

TOPOLOGIES: Final = ("server", "naive", "ring", "halving", "butterfly", "by link")
SLICES_EACH: Final = 8
"""Slices for each peer, where slices have owners: the sum of one travels while the next is still being sent."""
VALUE_BYTES: Final = 4

Vector = npt.NDArray[np.uint32]


class Transfer(NamedTuple):
    """The values from `begin` to `end` of the vector, on their way between two peers."""

    sender: int
    receiver: int
    begin: int
    end: int
    adds: bool
    """The receiver adds them to its own values; otherwise they are sums, and replace its own."""
    after: Sequence[int] = ()
    """The transfers of the plan that must have arrived at the sender. With none, the sender's own values are sent."""

    @property
    def size_bytes(self) -> int:
        return (self.end - self.begin) * VALUE_BYTES


Plan = list[Transfer]


def plan_of(
    topology: str, peers: int, values: int, weights: Sequence[int] = (), slices_each: int = SLICES_EACH
) -> Plan:
    """Return the transfers that give all peers the sum of their vectors of that many values. `weights`: of "by link",
    as a plan of the product has them; equal shares without."""
    match topology:
        case "naive":
            return _naive(peers, values)
        case "ring":
            return _ring(peers, values)
        case "halving":
            return _halving(peers, values)
    counts = owned(topology, peers, weights, slices_each)
    return _by_owner([owner for owner, count in enumerate(counts) for _ in range(count)], peers, values)


def owned(topology: str, peers: int, weights: Sequence[int] = (), slices_each: int = SLICES_EACH) -> list[int]:
    """Return how many slices each peer owns: of "server", "butterfly" and "by link"."""
    slices = slices_each * peers
    if topology == "server":
        return [slices] + [0] * (peers - 1)
    return deal(weights if topology == "by link" and weights else [1] * peers, slices)


def formula(
    topology: str, peers: int, size_bytes: float, weights: Sequence[int] = (), slices_each: int = SLICES_EACH
) -> list[float]:
    """Return the bytes that each peer sends; it receives as many. `size_bytes` is M."""
    each = 2 * (peers - 1) / peers * size_bytes
    match topology:
        case "server":
            return [(peers - 1) * size_bytes] + [size_bytes] * (peers - 1)
        case "naive":
            return [(peers - 1) * size_bytes] * peers
        case "halving":
            power = 1 << (peers.bit_length() - 1)
            inner, surplus = 2 * (power - 1) / power * size_bytes, peers - power
            return [inner + size_bytes] * surplus + [inner] * (power - surplus) + [size_bytes] * surplus
        case "by link":
            counts = owned(topology, peers, weights, slices_each)
            return [size_bytes * (1 + (peers - 2) * count / sum(counts)) for count in counts]
    return [each] * peers


def total(topology: str, peers: int, size_bytes: float) -> float:
    """Return the bytes that all peers together send: the least possible, except for "naive"."""
    return (peers if topology == "naive" else 2) * (peers - 1) * size_bytes


def traffic(plan: Plan, peers: int) -> tuple[list[int], list[int]]:
    """Return the bytes of the plan that each peer sends, and that it receives."""
    up, down = [0] * peers, [0] * peers
    for transfer in plan:
        up[transfer.sender] += transfer.size_bytes
        down[transfer.receiver] += transfer.size_bytes
    return up, down


class PartialSum:
    """One peer's vector in a plan: its own at first, the sum of all at the end. Values are added modulo 2^32, which is
    exact in any order."""

    def __init__(self, own: Vector) -> None:
        self._own, self.values = own, own.copy()

    def content(self, transfer: Transfer) -> Vector:
        """Return what this peer sends, once all before it has arrived."""
        return (self.values if transfer.after else self._own)[transfer.begin : transfer.end]

    def arrive(self, transfer: Transfer, content: Vector) -> None:
        """Take what another peer has sent."""
        place = self.values[transfer.begin : transfer.end]
        if transfer.adds:
            place += content
        else:
            place[:] = content


def vector_of(round: int, number: int, values: int) -> Vector:
    """Return the vector that a peer of that number has in a round."""
    return np.random.default_rng([round, number]).integers(0, 1 << 32, values, dtype=np.uint32)


def hash_of(vector: Vector) -> str:
    return blake3(vector.data.cast("B")).hexdigest()


def _cut(values: int, parts: int) -> list[tuple[int, int]]:
    return [(number * values // parts, (number + 1) * values // parts) for number in range(parts)]


def _by_owner(owners: Sequence[int], peers: int, values: int) -> Plan:
    plan: Plan = []
    for owner, (begin, end) in zip(owners, _cut(values, len(owners)), strict=True):
        others = [(owner + step) % peers for step in range(1, peers)]
        first = len(plan)
        plan += [Transfer(other, owner, begin, end, adds=True) for other in others]
        contributions = range(first, len(plan))
        plan += [Transfer(owner, other, begin, end, False, contributions) for other in others]
    return plan


def _naive(peers: int, values: int) -> Plan:
    parts = _cut(values, SLICES_EACH)
    return [
        Transfer(sender, (sender + step) % peers, begin, end, adds=True)
        for begin, end in parts
        for step in range(1, peers)
        for sender in range(peers)
    ]


def _ring(peers: int, values: int) -> Plan:
    """In each step a peer passes on the part that it received in the step before: n - 1 steps until a part is summed,
    and as many until all have it."""
    parts, plan = _cut(values, peers), Plan()
    for step in range(2 * (peers - 1)):
        for peer in range(peers):
            before = [(step - 1) * peers + (peer - 1) % peers] if step else ()
            plan.append(Transfer(peer, (peer + 1) % peers, *parts[(peer - step) % peers], step < peers - 1, before))
    return plan


def _halving(peers: int, values: int) -> Plan:
    power = 1 << (peers.bit_length() - 1)
    plan, arrived = Plan(), [list[int]() for _ in range(peers)]

    def step(sends: Sequence[tuple[int, int, int, int]], adds: bool) -> None:
        """Add the transfers (sender, receiver, begin, end) of one step, each after all that its sender has received."""
        first = len(plan)
        plan.extend(Transfer(*send, adds, tuple(arrived[send[0]])) for send in sends)
        for number, send in enumerate(sends, first):
            arrived[send[1]].append(number)

    step([(peer, peer - power, 0, values) for peer in range(power, peers)], adds=True)
    kept, distances = [(0, values)] * power, [1 << bit for bit in range(power.bit_length() - 1)]
    for distance in reversed(distances):
        sends = []
        for peer, (begin, end) in enumerate(kept):
            middle = (begin + end) // 2
            low, high = (begin, middle), (middle, end)
            kept[peer], sent = (high, low) if peer & distance else (low, high)
            sends.append((peer, peer ^ distance, *sent))
        step(sends, adds=True)
    for distance in distances:
        step([(peer, peer ^ distance, *part) for peer, part in enumerate(kept)], adds=False)
        kept = [(min(kept[p][0], kept[p ^ distance][0]), max(kept[p][1], kept[p ^ distance][1])) for p in range(power)]
    step([(peer - power, peer, 0, values) for peer in range(power, peers)], adds=False)
    return plan
