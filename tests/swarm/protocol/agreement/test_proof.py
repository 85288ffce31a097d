"""What a peer without a vote believes: a chain of certificates from what the coordinator has signed, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.proof import ProofChecker
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Head, genesis
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, GroupOfNodes

Links = tuple[msg.ChainLink, ...]


def is_proved(group: GroupOfNodes, head: Head, proof: Sequence[msg.ChainLink], **config: Any) -> bool:
    """Whether a client believes the head."""
    facts: dict[str, Any] = {"genesis": GENESIS, "peer": "client", "coordinator": COORDINATOR} | config
    checker = ProofChecker(AgreementConfig(**facts), group.table.of("client"))
    try:
        checker.check(head, proof)
    except ProtocolViolation:
        return False
    return True


def proof_at(group: GroupOfNodes, peer: str) -> tuple[Head, Links]:
    node = group.machines[peer].node
    return node.head, node.proof_of(node.head.hash)


def with_votes(link: msg.ChainLink, votes: Sequence[Signed]) -> msg.ChainLink:
    return msgspec.structs.replace(link, votes=tuple(votes))


def test_a_member_proves_its_head_from_the_start_of_its_term() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(3)
    for peer in ("A", "B", "C", COORDINATOR):
        head, proof = proof_at(group, peer)
        assert [link.head.round for link in proof] == [*range(head.round + 1)] and proof[0].start is not None
        assert is_proved(group, head, proof)
        assert not is_proved(group, head, ()) and not is_proved(group, head, proof[1:])


def test_the_first_head_of_all_needs_no_proof() -> None:
    group = GroupOfNodes("ABC", min_peers=4)
    assert group.machines["A"].node.proof_of(GENESIS.hash) == ()
    assert is_proved(group, GENESIS, ())
    other = genesis("run", bytes(32))
    assert not is_proved(group, other, ())
    assert not is_proved(group, msgspec.structs.replace(GENESIS, round=7), ())


def test_a_proof_is_of_one_head_of_one_group_and_one_coordinator() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    head, proof = proof_at(group, "A")
    assert not is_proved(group, msgspec.structs.replace(head, tokens=0), proof)
    assert not is_proved(group, proof[-2].head, proof)
    assert not is_proved(group, head, proof, coordinator="A")
    assert not is_proved(group, head, proof, genesis=genesis("another", GENESIS.state_hash))
    assert not is_proved(group, head, (proof[0], *proof[2:])), "a gap"
    assert not is_proved(group, head, (*proof[:1], proof[2], proof[1]))


@pytest.mark.parametrize("liars", ["", "A", "B", "AW"])
def test_a_minority_and_strangers_prove_nothing(liars: str) -> None:
    """Votes of one of three members lead nowhere, also twice and with the vote of a peer that is no voter here."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head, proof = proof_at(group, "A")
    false = msgspec.structs.replace(head, round=head.round + 1, previous=head.hash, state_hash=bytes(32))
    votes = [group.vote(liar, head, 0, false) for liar in liars]
    assert not is_proved(group, false, (*proof, msg.ChainLink(false, votes=tuple(votes))))
    assert not is_proved(group, false, (*proof, msg.ChainLink(false, votes=tuple(votes * 3))))
    honest = [group.vote(peer, head, 0, false) for peer in "AB"]
    assert is_proved(group, false, (*proof, msg.ChainLink(false, votes=tuple(honest)))), "the control"
    mixed = [group.vote("A", head, 0, false), group.vote("B", head, 1, false)]
    assert not is_proved(group, false, (*proof, msg.ChainLink(false, votes=tuple(mixed))))


def test_a_start_that_the_coordinator_has_not_signed_proves_nothing() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(1)
    _, proof = proof_at(group, "A")
    start = proof[0]
    assert is_proved(group, start.head, (start,))
    forged = group.sign("A", evidence.START, msg.StartBody(start.head))
    assert not is_proved(group, start.head, (msgspec.structs.replace(start, start=forged),))


def test_an_endorsement_shortens_the_proof() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(18, seconds=400.0)
    head, proof = proof_at(group, "A")
    assert proof[0].endorsement is not None and proof[0].head.round == 16
    assert is_proved(group, head, proof)
    of_another = group.sign(COORDINATOR, evidence.ENDORSEMENT, msg.EndorsementBody(bytes(32)))
    assert not is_proved(group, head, (msgspec.structs.replace(proof[0], endorsement=of_another), *proof[1:]))
    own = group.sign("A", evidence.ENDORSEMENT, msg.EndorsementBody(proof[0].head.hash))
    assert not is_proved(group, head, (msgspec.structs.replace(proof[0], endorsement=own), *proof[1:]))
    elsewhere = msgspec.structs.replace(proof[0].head, run_id="another")
    endorsed = group.sign(COORDINATOR, evidence.ENDORSEMENT, msg.EndorsementBody(elsewhere.hash))
    assert not is_proved(group, elsewhere, (msg.ChainLink(elsewhere, endorsement=endorsed),)), "of another stage"


def test_where_the_coordinator_is_required_its_vote_is_enough() -> None:
    group = GroupOfNodes("ABC", mode="required")
    group.run_to(3)
    for peer in ("A", "B", "C", COORDINATOR):
        head, proof = proof_at(group, peer)
        assert len(proof) == 1 and is_proved(group, head, proof, mode="required")
        assert not is_proved(group, head, proof), "in another mode it is one vote among others"
    without = [signed for signed in proof[0].votes if signed.signer != COORDINATOR]
    assert not is_proved(group, head, (with_votes(proof[0], without),), mode="required")


def test_a_node_without_its_anchor_gives_no_proof() -> None:
    """A member that restarts with links but without the start of its term cannot prove its head."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    chain = group.machines["A"].node._chain
    del chain._links[next(iter(chain._links))]
    assert group.machines["A"].node.proof_of(group.head("A").hash) == ()


def test_a_proof_survives_a_restart() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.start("A")
    head, proof = proof_at(group, "A")
    assert head.round >= 2 and is_proved(group, head, proof)
