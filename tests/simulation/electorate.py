"""Quorums, certificates, electorates and ledgers as the specification says, written again without the core."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Ledger, Range, union, without
from swarm.protocol.plan import Contribution
from tests.simulation.setups import COORDINATOR, Setup
from tests.simulation.signatures import Signatures
from tests.simulation.tensors import SCHEDULE, Tensors

if TYPE_CHECKING:
    from tests.simulation.invariants import Invariants

Position = tuple[int, int, int]


def position(head: Head) -> Position:
    return (head.term, head.boot, head.round)


def voters(setup: Setup, head: Head) -> tuple[Member, ...]:
    """Return who votes on what follows a head."""
    if head.witness is not None and (setup.mode == "required" or len(head.members) % 2 == 0):
        return (*head.members, head.witness)
    return head.members


def is_quorum(setup: Setup, head: Head, cast: set[Member]) -> bool:
    """Return whether these voters are enough to decide what follows a head."""
    members = len(head.members)
    mine = len(cast.intersection(head.members))
    if setup.mode == "required":
        return mine >= members // 2 + 1 and head.witness in cast
    everybody = voters(setup, head)
    return len(cast.intersection(everybody)) >= len(everybody) // 2 + 1


def require_certificate(invariants: Invariants, setup: Setup, signatures: Signatures, link: msg.ChainLink) -> None:
    """Raise unless real signatures of a quorum stand behind a head that an honest peer committed (4, 11)."""
    from tests.simulation.invariants import Broken

    head, name = link.head, link.head.hash
    if link.start is not None:
        started = signatures.open(link.start, "agreement.start", msg.StartBody)
        if link.start.signer != COORDINATOR or started.head != head:
            raise Broken("2 lineage", f"the coordinator has not signed the start of term {head.term}")
        return
    before = invariants.heads.get(head.previous)
    if before is None:
        raise Broken("2 lineage", f"round {head.round} follows a head that no honest peer has committed")
    votes = [(signatures.open(signed, "agreement.vote", msg.VoteBody), signed) for signed in link.votes]
    right = {
        vote.voter: vote.attempt
        for vote, signed in votes
        if (vote.head, vote.value) == (head.previous, name) and vote.voter.peer == signed.signer
    }
    if len(set(right.values())) != 1 or not is_quorum(setup, before, set(right)):
        raise Broken("11 not by hearsay", f"round {head.round} of term {head.term} has no certificate")


def require_earned(setup: Setup, signatures: Signatures, before: Head, head: Head) -> None:
    """Raise unless the next electorate follows from what its peers did (10)."""
    problem = _unearned(setup, signatures, before, head)
    if problem:
        from tests.simulation.invariants import Broken

        raise Broken("10 electorate", f"round {head.round} of term {head.term}: {problem}")


def _unearned(setup: Setup, signatures: Signatures, before: Head, head: Head) -> str:
    room = max(1, (len(before.members) - 1) // 2)
    old, new = set(before.members), set(head.members)
    merged = {learner.member: learner.merged for learner in before.learners}
    if len(new - old) > room or any(merged.get(member, 0) < 1 for member in new - old):
        return f"{sorted(new - old)} came in unearned"
    leader = before.members[(int.from_bytes(before.hash[:8], "big") + head.attempt) % len(before.members)]
    missing = {absence.member: absence for absence in before.absent}
    replaced = {member.peer for member in new - old}
    for member in sorted(old - new):
        convicted = member.peer in setup.lying
        entry = missing.get(member)
        once = entry is not None and entry.rounds < 2 and entry.leader == leader
        if once and member.peer not in replaced and not convicted:
            return f"{member} was dropped by one leader"
        if member not in missing and not convicted and member.peer not in replaced:
            return f"{member} was dropped at its first absence"
    learning = {learner.member for learner in head.learners}
    fresh = learning - set(merged)
    if len(fresh) > room:
        return f"{len(fresh)} newcomers came in at once"
    for member in sorted(fresh):
        if not signatures.has_signed(member.peer, "agreement.join"):
            return f"{member} has not asked to join"
    if len(new) + len(learning) > max(setup.members + 4, len(old) + len(merged)):
        return "there are more than max_peers"
    # A peer may be a member and, after it has lost its disk, a learner that is to take the member's place.
    serials = [serial for peer in {m.peer for m in new | learning} if (serial := setup.invite_of(peer))]
    if len(serials) != len(set(serials)):
        return "one invite has two votes"
    if len({member.peer for member in new}) != len(new):
        return "one peer has two votes"
    return ""


def require_whole_batch(setup: Setup, tensors: Tensors, before: Head, head: Head) -> None:
    """Raise unless a round of a synchronous pipeline has merged the whole next batch, each sample once, and nothing
    else (8)."""
    if not setup.batch:
        return
    from tests.simulation.invariants import Broken

    whole = [(0, head.round * setup.batch)]
    merged = tensors.states[head.state_hash]
    if list(merged.samples) != whole or head.ledger.cursor != head.round * setup.batch:
        raise Broken("8 no half round", f"round {head.round} has merged {merged.samples} of {whole}")
    if head.tokens - before.tokens != setup.batch * SCHEDULE.seq_len:
        raise Broken("8 no half round", f"round {head.round} counts the tokens of another number of samples")


def require_forged_by_owners(setup: Setup, tensors: Tensors, before: Head, head: Head) -> None:
    """Raise if a round has made-up weights in a slice that no liar owned (5): a certificate says that all have the same
    weights, and an owner's lie reaches no further than its own slices."""
    from tests.simulation.invariants import Broken

    results = tensors.results.get(head.state_hash, ())
    if tensors.forged.isdisjoint(results):
        return
    signed = msgspec.msgpack.decode(tensors.rosters[head.state_hash].body, type=msg.RosterBody).contributions
    bodies = [msgspec.msgpack.decode(one.body, type=Contribution) for one in signed]
    owning = [body for body in bodies if body.member in before.members]
    first = int.from_bytes(blake3(head.previous).digest()[:8], "big") % len(owning)
    owning = [*owning[first:], *owning[:first]]
    counts = dealt([_share(tensors.plans.get(head.state_hash), body) for body in owning], len(results))
    owners = [body.member.peer for body, count in zip(owning, counts, strict=True) for _ in range(count)]
    for owner, name in zip(owners, results, strict=True):
        if name in tensors.forged and owner not in setup.lying:
            raise Broken("5 weights", f"round {head.round} has made-up weights in a slice of {owner}")


def _share(signed_plan: Signed | None, body: Contribution) -> int:
    """Return how much a contributor merges, in proportion."""
    plan = None if signed_plan is None else msgspec.msgpack.decode(signed_plan.body)
    if body.client is True or plan is None or "shares" not in plan:
        return int(body.client is not True)
    names = [assignment["member"] for assignment in plan["assignments"]]
    return int(plan["shares"][names.index(msgspec.to_builtins(body.member))])


def dealt(weights: Sequence[int], slices: int) -> list[int]:
    """Return how many slices each gets: equal contiguous parts if all weights are; else the next one always goes to the
    largest weight for each half slice that it has (Webster), none to who has four equal parts or half already, unless
    all that may have more have."""
    n = len(weights)
    if len(set(weights)) == 1:
        starts = [index * n // slices for index in range(slices)]
        return [starts.count(place) for place in range(n)]
    owners, counts = sum(weight > 0 for weight in weights), [0] * n
    most = -(-slices * max(Fraction(1, owners), min(Fraction(4, n), Fraction(1, 2))) // 1)
    for _ in range(slices):
        open_places = [place for place in range(n) if weights[place] and counts[place] < most]
        counts[max(open_places, key=lambda place: (Fraction(weights[place], 2 * counts[place] + 1), -place))] += 1
    return counts


def trained(ledger: Ledger) -> tuple[Range, ...]:
    """Return the samples that a ledger says are merged."""
    promised = [r for _, ranges in ledger.promised for r in ranges]
    return union(without([(0, ledger.cursor)], [*ledger.returned, *promised]))
