"""Long messages are sent deflated to peers that take them so, and what those may grow to is bounded."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from blake3 import blake3

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import actions, packing
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.packing import GROWS_MAX, PACKED_MIN, Packer, unpacked
from swarm.protocol.agreement.rules import evidence
from tests.swarm.protocol.agreement.group import GroupOfNodes, Machine

SHORT = 1000  # bytes: names are shorter in a test than in use


class Watched(GroupOfNodes):
    """Notes who sends a packed message to whom, and what is in it."""

    def __init__(self, peers: str, train_s: float) -> None:
        self.packed: list[tuple[str, str, msg.Message]] = []
        super().__init__(peers, train_s)

    def _do(self, machine: Machine, action: actions.Action) -> None:
        if isinstance(action, actions.Send) and isinstance(action.message, msg.PackedMessage):
            self.packed.append((machine.peer, action.peer, unpacked(action.message)))
        super()._do(machine, action)


def plan_of(size: int) -> msg.PlanMessage:
    """Return a message of about that many bytes, of which a half repeats."""
    body = blake3(b"plan").digest(size // 2) + bytes(size // 2)
    return msg.PlanMessage(bytes(32), 0, Signed(body, "A", b""))


def packed(data: bytes) -> msg.PackedMessage:
    return msg.PackedMessage(zlib.compress(data, 1))


def test_what_is_packed_comes_out_as_it_was_and_is_packed_once() -> None:
    packer, plan = Packer(), plan_of(2 * PACKED_MIN)
    sent = packer.pack(plan)
    assert isinstance(sent, msg.PackedMessage) and unpacked(sent) == plan
    assert len(sent.deflated) < 0.7 * len(msgspec.msgpack.encode(plan))
    assert packer.pack(plan) is sent


@pytest.mark.parametrize(
    "message",
    [
        plan_of(PACKED_MIN // 2),
        msg.PlanMessage(bytes(32), 0, Signed(bytes(100 * PACKED_MIN), "A", b"")),
        msg.VoteMessage(Signed(bytes(2 * PACKED_MIN), "A", b"")),
    ],
    ids=["short", "grows too much", "a kind that receivers look at"],
)
def test_other_messages_are_sent_as_they_are(message: msg.Message) -> None:
    assert Packer().pack(message) is message


@pytest.mark.parametrize(
    "message",
    [
        msg.PackedMessage(b"no deflated bytes"),
        packed(b"no message"),
        packed(msgspec.msgpack.encode(msg.JoinMessage(Signed(b"", "A", b"")))),
        packed(msgspec.msgpack.encode(packed(b""))),
        packed(msgspec.msgpack.encode(plan_of(64)) + b"more"),
        packed(msgspec.msgpack.encode(msg.PlanMessage(bytes(32), 0, Signed(bytes(1 << 20), "A", b"")))),
        msg.PackedMessage(zlib.compress(msgspec.msgpack.encode(plan_of(9000)), 1)[:-5]),
        msg.PackedMessage(zlib.compress(msgspec.msgpack.encode(plan_of(9000)), 1) + b"more"),
    ],
    ids=["noise", "no message", "another kind", "packed twice", "two", "a bomb", "cut short", "more behind it"],
)
def test_a_malformed_one_accuses_its_sender(message: msg.PackedMessage) -> None:
    with pytest.raises(ProtocolViolation, match="a packed message"):
        unpacked(message)
    assert not list(evidence.signed_in(message, GroupOfNodes("A").head("A")))
    group = GroupOfNodes("AB")
    group.run_to(1)
    (accused,) = [a for a in group.give("A", message, "B") if isinstance(a, actions.Accuse)]
    assert accused.peer == "B" and "a packed message" in accused.reason


def test_a_bomb_is_not_inflated() -> None:
    """What it would grow to is not reached: the inflater stops at a bound that its length gives."""
    bomb = msg.PackedMessage(zlib.compress(bytes(64 << 20), 1))
    assert GROWS_MAX * len(bomb.deflated) < 4 << 20
    with pytest.raises(ProtocolViolation):
        unpacked(bomb)


def test_rosters_and_certificates_go_packed_to_those_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACKED_MIN", SHORT)
    group = Watched("ABCDEFGHIJKLMNOP", train_s=3.0)
    group.run_to(3)
    assert {msg.RosterMessage, msg.ChainMessage} <= {type(message) for _, _, message in group.packed}
    group.change = lambda source, message: (
        msgspec.structs.replace(message, unpacks=False)
        if isinstance(message, msg.StatusMessage) and source == "A"
        else message
    )
    group.run_to(5)
    group.packed.clear()
    group.run_to(7)
    assert group.packed and all(target != "A" for _, target, _ in group.packed)


def test_a_driver_finds_the_signatures_in_a_packed_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACKED_MIN", SHORT)
    group = GroupOfNodes("ABCDEFGHIJKLMNOP")
    group.run_to(2)
    node = group.machines["A"].node
    link = node._chain.link(group.head("A").hash)
    assert link is not None
    page, before = msg.ChainMessage((link,)), group.machines["A"].committed[-2]
    sent = Packer().pack(page)
    assert isinstance(sent, msg.PackedMessage)
    assert list(evidence.signed_in(sent, before)) == list(evidence.signed_in(page, before)) != []
