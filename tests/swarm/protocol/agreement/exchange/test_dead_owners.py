"""An exchange that a dead owner holds up: it ends at the first failure, not at its deadline."""

from __future__ import annotations

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.rules.electorate import leader_of
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes


def test_an_exchange_ends_when_what_a_dead_owner_has_signed_cannot_be_had() -> None:
    """The owner told the leader the hashes of its results, and died before it sent one to any peer. The leader, which
    had all hashes, waited for its own build, which had failed, until the exchange was to be over."""
    group = GroupOfNodes("ABCD")
    group.run_to(1)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    owner = min(set("ABCD") - {leader})

    def lose(source: str, target: str, message: msg.Message) -> bool:
        if source == owner and isinstance(message, msg.ResultsMessage) and group.machines[owner].up:
            group.at(group.now, lambda: group.crash(owner))
        return False

    def build(peer: str, state: bytes) -> tuple[float, bytes | None]:
        return 0.05, state if group.told(leader, "attempt_failed") else None

    group.lost, group.build = lose, build
    group.run(60.0, lambda: not group.machines[owner].up)
    group.run(0.5)  # builds fail; at last the failure detector knows why
    for peer in sorted({*"ABCD", COORDINATOR} - {owner}):
        group.event(peer, events.PeerDown(owner))
    group.run(0.1)
    assert [failed["reason"] for failed in group.told(leader, "attempt_failed")] == ["an owner of slices is down"]
    group.run_to(2, "".join(sorted(set("ABCD") - {owner})))


def test_an_exchange_ends_when_the_build_fails_after_the_owner_is_suspected() -> None:
    """As above, but the failure detector is faster than the build."""
    group = GroupOfNodes("ABCD")
    group.run_to(1)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    owner = min(set("ABCD") - {leader})

    def suspect() -> None:
        for peer in sorted({*"ABCD", COORDINATOR} - {owner}):
            group.event(peer, events.PeerDown(owner))

    def build(peer: str, state: bytes) -> tuple[float, bytes | None]:
        attempt = group.machines[leader].node._round.leader._attempt
        told = attempt is not None and attempt.exchange is not None and attempt.exchange.hashes is not None
        if peer == leader and told and group.machines[owner].up:
            group.crash(owner)
            group.at(group.now, suspect)
        return 0.3, state if group.told(leader, "attempt_failed") else None

    group.build = build
    group.run(60.0, lambda: not group.machines[owner].up)
    group.run(1.0)
    assert [failed["reason"] for failed in group.told(leader, "attempt_failed")] == ["an owner of slices is down"]
    group.run_to(2, "".join(sorted(set("ABCD") - {owner})))
