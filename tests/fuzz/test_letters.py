"""The costliest letter that a member may send: how many signatures it has a member of a group of four verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peer import identity
from peer.errors import ProtocolViolation
from peer.identity import Identity, Signed, sign_body
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import CONTRIBUTION_KIND, PLAN_KIND, Contribution, WorkPlan
from swarm.rounds.messages import BATCH_BYTES_MAX, MESSAGES_MAX, MessageBatch
from tests.swarm.support.hostile import Scene, hostile_scene

pytestmark = pytest.mark.slow

VERIFIED_MAX = 256
"""Of one letter. It has room for 3,300 signatures, which would block the event loop for half a second."""
STRANGERS = [Identity(number.to_bytes(32, "big")) for number in range(1, 33)]
replace = msgspec.structs.replace


def full(make: Callable[[int], Any]) -> list[Any]:
    """Return as many of something as a letter has room for."""
    size = len(msgspec.msgpack.encode(make(0)))
    return [make(number) for number in range(BATCH_BYTES_MAX * 9 // 10 // size)]


def votes(scene: Scene, head: Head, value: bytes, signers: list[Identity]) -> tuple[Signed, ...]:
    def vote(number: int) -> Signed:
        signer = signers[number % len(signers)]
        body = msg.VoteBody(head.hash, 0, value, Member(signer.peer_id, str(number)))
        return sign_body(signer, evidence.VOTE, body)

    return tuple(full(vote))


def chain_of_strangers(scene: Scene, head: Head) -> list[Any]:
    value = replace(head, round=head.round + 1, previous=head.hash)
    return [msg.ChainMessage((msg.ChainLink(value, votes=votes(scene, head, value.hash, STRANGERS)),))]


def chain_of_its_own(scene: Scene, head: Head) -> list[Any]:
    value = replace(head, round=head.round + 1, previous=head.hash)
    mine = [scene.liar.member.host.identity]
    return [msg.ChainMessage((msg.ChainLink(value, votes=votes(scene, head, value.hash, mine)),))]


def many_chains(scene: Scene, head: Head) -> list[Any]:
    """Sixteen chains with as many of its own votes each as are looked at."""
    value = replace(head, round=head.round + 1, previous=head.hash)
    cast = votes(scene, head, value.hash, [scene.liar.member.host.identity])
    step = len(cast) // MESSAGES_MAX - 4
    parts = [cast[n * step : (n + 1) * step] for n in range(MESSAGES_MAX)]
    return [msg.ChainMessage((msg.ChainLink(value, votes=part),)) for part in parts]


def leads(scene: Scene, head: Head) -> int:
    return next(a for a in range(64) if leader_of(head, head.hash, a).peer == scene.liar.peer)


def promises_of(signer: list[Identity]) -> Callable[[Scene, Head], list[Any]]:
    def proposal(scene: Scene, head: Head) -> list[Any]:
        liar, attempt = scene.liar, leads(scene, head)
        signers = signer or [liar.member.host.identity]

        def promise(number: int) -> Signed:
            by = signers[number % len(signers)]
            body = msg.PromiseBody(head.hash, attempt, Member(by.peer_id, str(number)))
            return sign_body(by, evidence.PROMISE, body)

        value = replace(head, round=head.round + 1, previous=head.hash)
        signed = liar.sign(evidence.PROPOSAL, msg.ProposalBody(head.hash, attempt, value.hash))
        support = msg.Support(signed, signed, ())
        return [msg.ProposalMessage(signed, value, tuple(full(promise)), support)]

    return proposal


def roster(scene: Scene, head: Head, **fields: Any) -> list[Any]:
    """A roster over the plan that the liar makes of the present one."""
    liar, attempt = scene.liar, leads(scene, head)
    plan = _plan(scene, head, attempt)
    signed_plan = liar.sign(PLAN_KIND, plan)
    body = msg.RosterBody(head.hash, attempt, plan.hash, fields.pop("contributions", ()), **fields)
    return [msg.RosterMessage(head.hash, attempt, signed_plan, liar.sign(evidence.ROSTER, body))]


def _plan(scene: Scene, head: Head, attempt: int) -> WorkPlan:
    node: Any = scene.honest[0].driver.group._node
    signed = node._round.instance.signed_plan
    assert signed is not None
    return replace(msgspec.msgpack.decode(signed.body, type=WorkPlan), head=head.hash, attempt=attempt)


def contributions(scene: Scene, head: Head) -> list[Any]:
    liar, plan = scene.liar, _plan(scene, head, leads(scene, head))
    member = liar.member.driver.me

    def contribution(number: int) -> Signed:
        body = Contribution(head.hash, plan.hash, member, 0, 0, float(number), (), ())
        return liar.sign(CONTRIBUTION_KIND, body)

    return roster(scene, head, contributions=tuple(full(contribution)))


def joins(scene: Scene, head: Head) -> list[Any]:
    def join(number: int) -> Signed:
        by = STRANGERS[number % len(STRANGERS)]
        return sign_body(by, evidence.JOIN, msg.JoinBody(head.hash, Member(by.peer_id, str(number))))

    return roster(scene, head, joins=tuple(full(join)))


def proofs(scene: Scene, head: Head) -> list[Any]:
    def proof(number: int) -> msg.Contradiction:
        by = STRANGERS[number % len(STRANGERS)]
        pair = (msg.VoteBody(head.hash, number, bytes([n]) * 32, Member(by.peer_id, "s")) for n in range(2))
        return msg.Contradiction(evidence.VOTE, *(sign_body(by, evidence.VOTE, body) for body in pair))

    return roster(scene, head, proofs=tuple(full(proof)))


LETTERS: dict[str, Callable[[Scene, Head], list[Any]]] = {
    "chain of strangers": chain_of_strangers,
    "chain of its own": chain_of_its_own,
    "many chains": many_chains,
    "promises of strangers": promises_of(STRANGERS),
    "promises of its own": promises_of([]),
    "contributions": contributions,
    "joins": joins,
    "proofs": proofs,
}


@pytest.mark.parametrize("name", LETTERS)
async def test_a_letter_of_a_mebibyte_blocks_no_member(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = list[str]()

    def counted(peer_id: str, message: bytes, signature: bytes) -> bool:
        verified.append(peer_id)
        return verify(peer_id, message, signature)

    verify = identity.verify_signature
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        driver = scene.honest[0].driver.group
        node: Any = driver._node
        await scene.group.until(lambda: node._round.instance.signed_plan is not None)
        messages = LETTERS[name](scene, driver.head)  # no await from here on: the head stays
        data = msgspec.msgpack.encode(MessageBatch(driver.group, tuple(messages)))
        assert 0.5 * BATCH_BYTES_MAX < len(data) <= BATCH_BYTES_MAX
        letter = msgspec.msgpack.decode(data, type=MessageBatch)
        monkeypatch.setattr(identity, "verify_signature", counted)
        with pytest.raises(ProtocolViolation):
            driver.receive(scene.liar.peer, letter.messages)
        assert len(verified) <= VERIFIED_MAX
