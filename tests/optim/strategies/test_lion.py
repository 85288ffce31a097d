"""Distributed Lion on the network: votes and their sums, without loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.algorithms.lion import LionRule
from optim.codecs.votes import Votes, pack_tally, tally_bytes, unpack_tally
from optim.strategies.interface import Sent
from optim.strategies.lion import AverageCoding, LionStrategy, MajorityCoding
from peer.errors import ProtocolViolation
from tests.optim.support.rounds import Rounds

N = 20_000


def votes(seed: int, numel: int = N) -> torch.Tensor:
    return torch.randint(-1, 2, (numel,), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("numel", [0, 1, 4, 4095, 4096, N])
def test_votes_round_trip(numel: int) -> None:
    data = Votes().encode(votes(1, numel))
    assert torch.equal(Votes().decode(data, numel), votes(1, numel))
    assert len(data) == numel // 4096 * 820 + -(-(numel % 4096) // 5)
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        Votes().encode(torch.full((5,), 0.5))


@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 2**31))
def test_sums_of_votes_round_trip(senders: int, numel: int, seed: int) -> None:
    sums = torch.randint(-senders, senders + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    data = pack_tally(sums, senders)
    assert len(data) == tally_bytes(numel, senders) == (2 * senders).bit_length() * -(-numel // 8)
    assert torch.equal(unpack_tally(data, numel, senders), sums)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(1, 100))
def test_any_bytes_are_a_mean_of_votes_or_refused(raw: bytes, numel: int) -> None:
    for coding in (AverageCoding(numel), MajorityCoding(numel)):
        for data in (raw, bytes([3, 0, 0, 0, 0, 0, 0, 0]) + raw, raw[: coding.message_bytes(0)]):
            try:
                updates = list(coding.updates(0, data))
            except ProtocolViolation:
                continue
            assert sum(len(update) for _, update in updates) == numel
            assert all(float(update.abs().max()) <= 1 for _, update in updates)


@pytest.mark.parametrize("peers", [2, 3, 4, 7])
@pytest.mark.parametrize("majority", [True, False])
def test_a_round_applies_the_decision_and_counts_its_bytes(peers: int, majority: bool) -> None:
    rounds = Rounds(lambda: LionStrategy(N, LionRule(), majority), torch.zeros(N), peers)
    products = [votes(k) * (k + 1) for k in range(peers)]  # a first vote is the gradient's sign, however long
    rounds.exchange(products, tokens=[10**k for k in range(peers)], lr=1.0)
    total = sum(votes(k) for k in range(peers))
    assert isinstance(total, torch.Tensor)
    decided = total.sign() if majority else total / peers
    assert torch.equal(rounds.tensors[0], -decided)
    assert rounds.bytes_up == pytest.approx(N * 1.6 / 8, rel=2e-3)
    bits = 1.6 if majority else (2 * peers).bit_length()
    assert rounds.bytes_down == pytest.approx(N * bits / 8, rel=3e-3)


def test_values_without_gradient_do_not_move() -> None:
    """The embedding of an unseen word: a sign in one bit would move it."""
    rounds = Rounds(lambda: LionStrategy(N, LionRule(), True), torch.ones(N), 3)
    for step in range(5):
        gradient = votes(step)
        gradient[: N // 2] = 0
        rounds.exchange([gradient] * 3, lr=0.1)
    assert torch.equal(rounds.tensors[0][: N // 2], torch.ones(N // 2))
    assert not torch.equal(rounds.tensors[0][N // 2 :], torch.ones(N // 2))


@pytest.mark.parametrize("coding", [MajorityCoding(64), AverageCoding(64)])
def test_a_result_with_too_many_votes_is_refused(coding: MajorityCoding) -> None:
    half = torch.cat([torch.ones(32), torch.zeros(32)])
    messages, sent = [Votes().encode(half)] * 3, [Sent(b"", 10.0, 1 / 3)] * 3  # they said 10 each, and cast 32
    coding.check_result([0], [coding.merge(0, messages, [1 / 3] * 3)], [Sent(b"", 32.0, 1 / 3)] * 3)
    with pytest.raises(ProtocolViolation, match="more votes than were cast"):
        coding.check_result([0], [coding.merge(0, messages, [1 / 3] * 3)], sent)
    if isinstance(coding, AverageCoding):
        with pytest.raises(ProtocolViolation, match="other voters"):
            coding.check_result([0], [coding.merge(0, messages[:2], [0.5] * 2)], sent)
