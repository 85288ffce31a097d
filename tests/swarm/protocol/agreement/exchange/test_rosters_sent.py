"""A leader of many sends its roster to a few that pass it on, and its proposal without it to those that have it."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.round import attempt
from swarm.protocol.agreement.round.attempt import DIRECT_MAX, SLOW_BITS_S, spread
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes

PEERS = "ABCDEFGHIJKLMNOP"


def at_round(round: int) -> GroupOfNodes:
    """Return a group of 16 that has committed that round, and has sent nothing since."""
    group = GroupOfNodes(PEERS, train_s=3.0)
    group.run_to(round)
    group.sent.clear()
    return group


def sent(group: GroupOfNodes, kind: type[msg.Message]) -> list[tuple[str, str]]:
    """Return who sent messages of that kind to which others."""
    return [(source, target) for source, target, m in group.sent if isinstance(m, kind) and source != target]


def bytes_by_sender(group: GroupOfNodes) -> Counter[str]:
    found = Counter[str]()
    for source, target, message in group.sent:
        if source != target:
            found[source] += len(msgspec.msgpack.encode(message))
    return found


@pytest.mark.parametrize("count", [0, 1, DIRECT_MAX, DIRECT_MAX + 1, 15, 63, 255])
def test_each_peer_gets_a_roster_on_one_way(count: int) -> None:
    peers = [str(i) for i in range(count)]
    ways = spread(peers, b"head")
    assert sorted([*ways, *(peer for others in ways.values() for peer in others)]) == sorted(peers)
    assert len(ways) == count if count <= DIRECT_MAX else len(ways) ** 2 <= count
    assert max(map(len, ways.values()), default=0) <= len(ways) + 2


def test_a_roster_reaches_each_once_and_most_not_from_the_leader() -> None:
    group = at_round(1)
    group.run_to(2)
    rosters = sent(group, msg.RosterMessage)
    leader = rosters[0][0]
    assert len(rosters) == len({target for _, target in rosters}) == len(PEERS) - 1
    assert sum(source == leader for source, _ in rosters) == 3
    assert set(sent(group, msg.ProposalMessage)) <= {(leader, COORDINATOR)}
    assert len(sent(group, msg.ShortProposalMessage)) == len(PEERS) - 1


def test_peers_behind_a_dead_one_get_the_roster_from_the_leader() -> None:
    group = at_round(1)
    lost: list[str] = []

    def lose(source: str, target: str, message: msg.Message) -> bool:
        if isinstance(message, msg.RosterMessage) and message.pass_on and (not lost or lost == [target]):
            lost[:] = [target]
            return True
        return False

    group.lost = lose
    group.run_to(2)
    rosters = sent(group, msg.RosterMessage)
    leader = rosters[0][0]
    assert lost and sum(source == leader for source, _ in rosters) > 3
    assert all(head.attempt == 0 for head in group.machines["A"].committed if head.round == 2)


@pytest.mark.parametrize(("bits_s", "repeats"), [(SLOW_BITS_S, True), (1e5, False)])
def test_a_roster_is_sent_again_only_after_it_may_have_come(
    monkeypatch: pytest.MonkeyPatch, bits_s: float, repeats: bool
) -> None:
    """The peers' answers are lost. 16 short rosters take 20 ms of a home's link, and five seconds of a slow one."""
    monkeypatch.setattr(attempt, "SLOW_BITS_S", bits_s)
    group = at_round(1)
    leader, _, _ = group.run_until_sent(msg.RosterMessage)
    group.lost = lambda source, target, message: target == leader
    group.run(3.0)
    targets = Counter(target for source, target in sent(group, msg.RosterMessage) if source == leader)
    assert targets and (max(targets.values()) > 1) == repeats


def test_a_voter_without_the_roster_is_sent_the_whole_proposal() -> None:
    """It said that it has the roster, and has lost it with its process."""
    group = at_round(1)
    leader, peer, _ = group.run_until_sent(msg.ShortProposalMessage)
    group.crash(peer)
    group.start(peer)
    group.lost = lambda source, target, message: isinstance(message, msg.VoteMessage)
    group.run(3.0)
    assert (leader, peer) in sent(group, msg.ProposalMessage)
    group.heal()
    group.run_to(2)


def test_software_that_does_not_name_its_roster_is_sent_all_by_the_leader() -> None:
    group = at_round(1)
    group.change = lambda source, message: (
        msgspec.structs.replace(message, roster=None)
        if isinstance(message, msg.StatusMessage) and source in ("A", "B")
        else message
    )
    group.run_to(2)  # what they have said of this round may be on its way
    group.sent.clear()
    group.run_to(3)
    leader = sent(group, msg.RosterMessage)[0][0]
    old = {"A", "B"} - {leader}
    assert all((leader, peer) in sent(group, msg.RosterMessage) for peer in old)
    assert {target for _, target in sent(group, msg.ProposalMessage)} - {COORDINATOR} == old
    assert all(target not in old for _, target in sent(group, msg.ShortProposalMessage))


def test_the_busiest_of_sixteen_sends_less_than_half_of_what_it_did() -> None:
    """Round 3 of a group that says nothing of rosters, as software before, beside one that does."""
    after, before = at_round(1), at_round(1)
    before.change = lambda source, message: (
        msgspec.structs.replace(message, roster=None) if isinstance(message, msg.StatusMessage) else message
    )
    for group in (after, before):
        group.run_to(2)  # what was said of this round may be on its way
        group.sent.clear()
        group.run_to(3)
    assert 2 * max(bytes_by_sender(after).values()) < max(bytes_by_sender(before).values())
