"""Bytes that the leader of a round sends besides slices, computed from the lengths of its messages."""

from __future__ import annotations

import math
from typing import Final

from swarm.protocol.agreement.packing import PACKED_MIN
from swarm.protocol.agreement.round.attempt import DIRECT_MAX
from swarm.protocol.roster_room import usual_bytes

PACKED_SHARE: Final = 0.4  # that a long message deflates to, but for its hashes and norms
ASSIGNMENT_BYTES: Final = 130  # of a plan, a member
HEAD_BYTES: Final = 90  # of a head, a member
VOTE_BYTES: Final = 350
SLICE_BYTES: Final = 42  # a hash and a norm, of which nothing is saved
STATUS_BYTES_S: Final = 1000  # four a second


def leader_bytes(members: int, slices: int, round_s: float, pipeline: bool = False) -> float:
    """Return about how many bytes the busiest member of a group of this size sends in a round of `round_s` seconds: the
    certificate of the round before, the plan, the roster and the proposal. The slices that it merges are not counted:
    those are the exchange."""
    plan = members * ASSIGNMENT_BYTES
    certificate = members * HEAD_BYTES + (members // 2 + 1) * VOTE_BYTES
    fixed = members * (usual_bytes(slices, pipeline) - slices * SLICE_BYTES)
    roster = _packed(plan + fixed) + members * slices * SLICE_BYTES
    results = slices * SLICE_BYTES + min(members, slices) * VOTE_BYTES
    others = members - 1
    if others <= DIRECT_MAX:
        return others * (_packed(plan) + _packed(certificate) + 2 * roster + results) + STATUS_BYTES_S * round_s
    sent = others * (_packed(plan) + _packed(certificate) + _packed(results)) + math.isqrt(others) * roster
    return sent + STATUS_BYTES_S * round_s


def _packed(size: float) -> float:
    return size if size < PACKED_MIN else PACKED_SHARE * size
