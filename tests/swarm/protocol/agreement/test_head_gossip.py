"""Idle traffic: what each member tells the others while nothing happens, in groups of ten, a hundred and a thousand."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.node import POLL_TIMER, AgreementNode
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import LINK_KEY, LinkRecord
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Head, Member
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, WORK, SignatureTable

POLLS = 3  # at each node, a second apart
STATUS_BYTES = 160
TOLD = 4  # others and the coordinator, at each poll


def idle_group(members: int) -> dict[str, AgreementNode]:
    """Return the coordinator and so many members that stand at the last head of a run, so that no round begins."""
    table = SignatureTable()
    peers = [f"{number:04d}" for number in range(members)]
    head: Head = msgspec.structs.replace(
        GENESIS,
        term=1,
        boot=1,
        round=1,
        previous=GENESIS.hash,
        members=tuple(Member(peer, f"{peer}0") for peer in peers),
    )
    link = msg.ChainLink(head, start=table.of(COORDINATOR).sign(evidence.START, msg.StartBody(head, ())))
    records = {f"{LINK_KEY}0": encode(LinkRecord(0, link, True))}
    nodes: dict[str, AgreementNode] = {}
    for peer in [COORDINATOR, *peers]:
        config = AgreementConfig(genesis=GENESIS, peer=peer, coordinator=COORDINATOR, min_peers=members, rounds=1)
        nodes[peer] = node = AgreementNode(config, table.of(peer), WORK)
        identity = {} if peer == COORDINATOR else {"identity": f"{peer}0".encode()}
        seed = peer.encode().ljust(32, b"\0")
        step(node, 0.0, events.Started({**records, **identity}, (GENESIS.state_hash,), f"{peer}0", seed))
        assert node.head == head
    return nodes


def step(node: AgreementNode, now: float, event: events.Event) -> list[actions.Action]:
    """Give a node an event, and let the disk write what it asks for."""
    found = node.step(now, event)
    for action in found:
        if isinstance(action, actions.Persist):
            found += node.step(now, events.Persisted(action.id))
    return found


def statuses(found: list[actions.Action]) -> list[tuple[str, msg.StatusMessage]]:
    sent = [action for action in found if isinstance(action, actions.Send)]
    return [(s.peer, s.message) for s in sent if isinstance(s.message, msg.StatusMessage)]


@pytest.mark.parametrize("members", [10, 100, 1000])
def test_idle_traffic_of_a_member_does_not_grow_with_its_group(members: int) -> None:
    """F15: each poll tells as many peers in every group, and a peer that stands at the same head does not answer. Only
    the coordinator hears of all."""
    nodes = idle_group(members)
    sent, received = Counter[str](), Counter[str]()
    for poll in range(1, POLLS + 1):
        for peer, node in nodes.items():
            for target, message in statuses(step(node, float(poll), events.TimerFired(POLL_TIMER))):
                size = len(encode(message))
                assert size <= STATUS_BYTES
                sent[peer] += size
                received[target] += size
                answers = step(nodes[target], float(poll), events.Received(peer, message))
                told_back = [action for action in answers if isinstance(action, actions.Send)]
                assert not told_back, (poll, peer, target, told_back[:2])
    heard = received.pop(COORDINATOR)
    assert members * POLLS * 100 < heard <= members * POLLS * STATUS_BYTES
    told = [sent[peer] / POLLS for peer in nodes if peer != COORDINATOR]
    assert min(told) > 400 and max(told) <= TOLD * STATUS_BYTES
    mean = sum(received.values()) / members / POLLS
    assert mean <= TOLD * STATUS_BYTES, "bytes a second that a member hears"
    assert max(received.values()) / POLLS <= 3 * TOLD * STATUS_BYTES, "no member hears much more than the others"
