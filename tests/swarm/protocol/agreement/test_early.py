"""Early messages: what free identities send before its time takes a bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.agreement import early
from swarm.protocol.agreement.early import EarlyMessages
from swarm.protocol.agreement.messages import AskMessage, Message
from swarm.protocol.agreement.output import encode

HEADS = [bytes([number]) * 32 for number in range(3)]
PEERS = 2 * early.PEERS_MAX
comers = st.lists(
    st.tuples(st.integers(0, PEERS - 1), st.sampled_from(HEADS), st.integers(1, 1 << 20)), min_size=1, max_size=60
)


def of_size(size: int) -> Message:
    return AskMessage("n" * size, b"")


@given(comers)
def test_they_take_few_bytes_and_the_last_one_is_there(came: list[tuple[int, bytes, int]]) -> None:
    kept = EarlyMessages()
    for number, head, size in came:
        kept.keep(head, f"peer {number}", of_size(size))
    here = [one for mine in kept._kept.values() for one in mine]
    assert kept._bytes == sum(len(encode(one.message)) for one in here) <= early.BYTES_MAX
    number, head, size = came[-1]
    found = kept.take(head)
    assert (f"peer {number}", of_size(size)) in found and not kept.take(head)
    assert len(found) <= sum(name == head for _, name, _ in came)


def test_of_a_flood_the_latest_peers_stay() -> None:
    kept = EarlyMessages()
    for number in range(PEERS):
        for _ in range(early.OF_ONE_PEER_MAX + 1):
            kept.keep(HEADS[0], f"peer {number:03}", of_size(10))
    found = kept.take(HEADS[0])
    assert len(found) == early.PEERS_MAX * early.OF_ONE_PEER_MAX
    assert {peer for peer, _ in found} == {f"peer {number:03}" for number in range(PEERS - early.PEERS_MAX, PEERS)}
