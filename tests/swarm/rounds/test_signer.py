"""The driver's signatures: how many a round costs, and that no wrong one passes where a thread has checked before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from peer import identity as identity_module
from peer.errors import ProtocolViolation
from peer.identity import Identity, Signed, sign_body
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.rules.evidence import PROMISE, VOTE, signed_in
from swarm.protocol.head import Member, genesis
from swarm.protocol.signer import KeySigner, check_all
from tests.swarm.protocol.agreement import group as nodes

ROUNDS = 3
PEERS = [Identity.generate() for _ in range(4)]
MEMBERS = tuple(sorted(Member(peer.peer_id, "s") for peer in PEERS[:3]))


FIRST = replace(genesis("run", bytes(32)), members=MEMBERS, term=1)


def page(links: int) -> tuple[msg.ChainLink, ...]:
    """Return a page of links, each with the votes of all members and of a stranger."""
    head, found = FIRST, list[msg.ChainLink]()
    for round in range(links):
        value = replace(head, round=round + 1, previous=head.hash)
        votes = [sign_body(p, VOTE, msg.VoteBody(head.hash, 0, value.hash, Member(p.peer_id, "s"))) for p in PEERS]
        found.append(msg.ChainLink(value, votes=tuple(votes)))
        head = value
    return tuple(found)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The signers of all signatures that are verified."""
    found: list[str] = []
    verify: Callable[[str, bytes, bytes], bool] = identity_module.verify_signature

    def noted(peer_id: str, message: bytes, signature: bytes) -> bool:
        found.append(peer_id)
        return verify(peer_id, message, signature)

    monkeypatch.setattr(identity_module, "verify_signature", noted)
    return found


def test_what_was_checked_is_not_checked_again(verified: list[str]) -> None:
    message = msg.ChainMessage(page(3))
    signed = list(signed_in(message, FIRST))
    assert len(signed) == 3 * 3 and PEERS[3].peer_id not in {entry.signer for _, entry in signed}
    repeated = replace(message.links[0], votes=message.links[0].votes * 9)
    assert len(list(signed_in(msg.ChainMessage((repeated,)), FIRST))) == 2 * 3, "as many as the node looks at"
    checked = check_all(signed)
    assert checked == signed and len(verified) == len(signed)
    signer = KeySigner(PEERS[0])
    with signer.knowing(checked):
        for kind, entry in signed:
            assert signer.open(entry, kind, msg.VoteBody).voter.peer == entry.signer
    assert len(verified) == len(signed)


def test_a_peer_checks_no_signature_of_its_own(verified: list[str]) -> None:
    signer, body = KeySigner(PEERS[0]), msg.VoteBody(FIRST.hash, 0, bytes(32), Member(PEERS[0].peer_id, "s"))
    signed = signer.sign(VOTE, body)
    assert signer.open(signed, VOTE, msg.VoteBody) == body and not verified
    assert KeySigner(PEERS[0]).open(signed, VOTE, msg.VoteBody) == body and len(verified) == 1
    with pytest.raises(ProtocolViolation):
        signer.open(signed, PROMISE, msg.VoteBody)


def test_a_wrong_signature_is_refused_whatever_was_checked(verified: list[str]) -> None:
    """It ends the checking; what comes after it is checked when the node asks, and for no other purpose."""
    (link,) = page(1)
    first, second, third, _ = link.votes
    false = Signed(second.body, second.signer, first.signature)
    checked = check_all([(VOTE, first), (VOTE, false), (VOTE, third)])
    assert checked == [(VOTE, first)] and len(verified) == 2
    signer = KeySigner(PEERS[0])
    with signer.knowing(checked):
        with pytest.raises(ProtocolViolation):
            signer.open(false, VOTE, msg.VoteBody)
        with pytest.raises(ProtocolViolation):
            signer.open(first, PROMISE, msg.VoteBody)
        with pytest.raises(ProtocolViolation):
            signer.open(first, VOTE, msg.ChainLink)
        signer.open(third, VOTE, msg.VoteBody)
    verified.clear()
    fresh = KeySigner(PEERS[0])
    with fresh.knowing(checked):
        pass
    fresh.open(first, VOTE, msg.VoteBody)
    assert verified == [first.signer], "what was checked counts for those messages only"


def test_a_round_verifies_each_signature_that_decides_once(
    monkeypatch: pytest.MonkeyPatch, verified: list[str]
) -> None:
    """At each of 16 members: a contribution and a vote of each member, and a few of the leader and the owners. At
    0.06 ms each that is half of the 5 ms that a round may cost."""
    identities = {peer.peer_id: peer for peer in (Identity.generate() for _ in range(17))}
    coordinator, *members = identities
    signers = {peer: KeySigner(identity) for peer, identity in identities.items()}
    monkeypatch.setattr(nodes, "COORDINATOR", coordinator)
    monkeypatch.setattr(nodes.SignatureTable, "of", lambda self, peer: signers[peer])
    group = nodes.GroupOfNodes(members, coordinator=coordinator)
    monkeypatch.setattr(group, "check", lambda: None)  # it knows one letter as a peer
    group.run_to(2, members)
    verified.clear()
    group.run_to(2 + ROUNDS, members)
    assert len(verified) <= ROUNDS * 16 * (2 * 16 + 8)
