"""Contributions of a pipeline's stage that have counted the same samples: no sample is merged twice.

If an answer is lost, two replicas that cannot ask each other may count the same micro-batch. Both name its samples, and
only one of the two contributions is merged. A liar may claim any samples. The choice follows from the contributions
and their receipts alone, so that all members decide alike. A peer whose contribution is not merged stays a member; the
samples that only it has counted are free again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from swarm.protocol.ledger import Range, count, union, without
from swarm.protocol.plan import Contribution


def select_disjoint(bodies: Sequence[Contribution], receipts: Sequence[Sequence[Range]] = ()) -> tuple[bool, ...]:
    """Choose contributions without common samples; return for each contribution whether it is merged.

    `receipts[i]`: the samples of contribution i with receipts of the stage before. While contributions overlap, one is
    left out: the one that claims, without receipts, most samples for which others have receipts, so that a liar cannot
    take samples that others counted. Among equals it is the one in conflict with most others, so that one that claims
    everything loses to all; then the one with the fewest receipts, the smaller one, the later one."""
    held = receipts or [()] * len(bodies)
    rivals, void = _conflicts(bodies, held)
    signed, sizes = [count(own) for own in held], [count(body.counted) for body in bodies]
    while rivals:
        worst = max(rivals, key=lambda i: (sum(void[i].values()), len(rivals[i]), -signed[i], -sizes[i], i))
        for other in rivals.pop(worst):
            rivals[other].discard(worst)
            void[other].pop(worst, None)
            if not rivals[other]:
                del rivals[other]
        void.pop(worst)
        sizes[worst] = -1
    return tuple(size >= 0 for size in sizes)


def covers_batch(bodies: Sequence[Contribution], batch: Range) -> bool:
    """Return whether contributions without common samples contain exactly the samples of `batch`."""
    return union(r for body in bodies for r in body.counted) == (batch,)


def _conflicts(
    bodies: Sequence[Contribution], receipts: Sequence[Sequence[Range]]
) -> tuple[dict[int, set[int]], dict[int, dict[int, int]]]:
    """Map each contribution that shares samples to the others that do; and each to the number of samples that it
    claims without a receipt and another one, the inner key, with one."""
    pieces = sorted(
        (first, last, i, signed)
        for i, body in enumerate(bodies)
        for signed, ranges in ((True, receipts[i]), (False, without(body.counted, receipts[i])))
        for first, last in ranges
    )
    rivals: dict[int, set[int]] = defaultdict(set)
    void: dict[int, dict[int, int]] = {i: defaultdict(int) for i in range(len(bodies))}
    reaching: list[tuple[int, int, bool]] = []  # (end, contribution, signed) of pieces that the next one may overlap
    for first, last, i, signed in pieces:
        reaching = [piece for piece in reaching if piece[0] > first]
        for end, other, others_signed in reaching:
            if other == i:
                continue
            rivals[i].add(other)
            rivals[other].add(i)
            if signed != others_signed:
                bare, holder = (other, i) if signed else (i, other)
                void[bare][holder] += min(end, last) - first
        reaching.append((last, i, signed))
    return dict(rivals), void
