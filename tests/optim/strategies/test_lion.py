"""Distributed Lion on the network: votes in a bit each, their majority and their sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.algorithms.lion import LionRule
from optim.codecs.votes import Decisions, Votes, pack_tally, tally_bytes, unpack_tally
from optim.strategies.interface import Sent
from optim.strategies.lion import AverageCoding, LionStrategy, MajorityCoding
from peer.errors import ProtocolViolation
from tests.optim.support.rounds import Rounds

N = 20_000


def votes(seed: int, numel: int = N) -> torch.Tensor:
    return torch.randint(-1, 2, (numel,), generator=torch.Generator().manual_seed(seed)).float()


def heard(ballot: np.ndarray, turn: int) -> np.ndarray:
    """Return what the votes (n,) arrive as: a 0 only where its block of 64 has no other vote."""
    blocks = np.pad(ballot, (0, -len(ballot) % 64)).reshape(-1, 64)
    seen = np.repeat(blocks.any(1), 64)[: len(ballot)]
    alternating = np.where((np.arange(len(ballot)) + turn) % 2 == 0, 1, -1)
    return np.where(ballot != 0, ballot, seen * alternating)


def on_the_wire(arrived: np.ndarray) -> bytes:
    """Return the bytes of votes that arrive like that."""
    data = b""
    for row in np.split(arrived, range(4096, len(arrived), 4096)):
        blocks = np.pad(row, (0, -len(row) % 64)).reshape(-1, 64)
        for bits in (~blocks.any(1), blocks > 0):
            data += np.packbits(bits, bitorder="little").tobytes()
    return data


@pytest.mark.parametrize("turn", [0, 7])
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 700, 4095, 4096, N, 300_001])
def test_votes_are_a_bit_each_and_a_bit_a_block(numel: int, turn: int) -> None:
    ballot = votes(1, numel)
    ballot[: numel // 3] = 0
    codec, arrived = Votes(turn), heard(ballot.numpy(), turn)
    data, sqnorm = codec.encode_with_sqnorm(ballot)
    assert data.numpy().tobytes() == on_the_wire(arrived)
    assert np.array_equal(codec.decode(data, numel), arrived)
    assert sqnorm == codec.decoded_sqnorm(data, numel) == np.abs(arrived).sum()
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        codec.encode(torch.full((5,), 0.5))


@pytest.mark.parametrize("numel", [0, 1, 4, 4095, 4096, N])
def test_decisions_round_trip(numel: int) -> None:
    data = Decisions().encode(votes(1, numel))
    assert torch.equal(Decisions().decode(data, numel), votes(1, numel))
    assert len(data) == numel // 4096 * 820 + -(-(numel % 4096) // 5)
    with pytest.raises(ValueError, match="-1, 0 or 1"):
        Decisions().encode(torch.full((5,), 0.5))


@settings(max_examples=300)
@given(st.data(), st.integers(1, 5000))
def test_any_bytes_are_votes_in_their_only_form_or_refused(data: st.DataObject, numel: int) -> None:
    codec = Votes(0)
    ballot = votes(numel, numel)
    ballot[64 : data.draw(st.sampled_from([0, 128, numel]))] = 0
    message = bytearray(codec.encode(ballot).numpy().tobytes())
    at = data.draw(st.one_of(st.integers(0, len(message) - 1), st.sampled_from([0, len(message) - 1])))
    message[at] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(message, numel)
    except ProtocolViolation:
        with pytest.raises(ProtocolViolation):
            codec.decoded_sqnorm(message, numel)
        return
    assert codec.encode(decoded).numpy().tobytes() == message
    assert codec.decoded_sqnorm(message, numel) == float(decoded.abs().sum())


@pytest.mark.parametrize(
    ("numel", "message"),
    [
        (128, b"\x01" + b"\x00" * 7 + b"\x80" + b"\x00" * 8),  # a sign in a block of zeros
        (128, b"\x04" + b"\x00" * 16),  # a third block of two
        (100, b"\x00" * 13 + b"\x10" + b"\x00" * 3),  # a sign of value 100
    ],
)
def test_signs_where_there_are_no_votes_are_refused(numel: int, message: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="encoded votes have signs"):
        Votes(0).decode(message, numel)
    with pytest.raises(ProtocolViolation, match="encoded votes have signs"):
        Votes(0).decoded_sqnorm(message, numel)


@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 2**31))
def test_sums_of_votes_round_trip(senders: int, numel: int, seed: int) -> None:
    sums = torch.randint(-senders, senders + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    data = pack_tally(sums, senders)
    assert len(data) == tally_bytes(numel, senders) == (2 * senders).bit_length() * -(-numel // 8)
    assert torch.equal(unpack_tally(data, numel, senders), sums)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(1, 100))
def test_any_bytes_are_a_mean_of_votes_or_refused(raw: bytes, numel: int) -> None:
    for coding in (AverageCoding(numel, 0), MajorityCoding(numel, 0)):
        for data in (raw, bytes([3, 0, 0, 0, 0, 0, 0, 0]) + raw, raw[: coding.result_bytes(0, 3)]):
            try:
                updates = list(coding.updates(0, data))
            except ProtocolViolation:
                continue
            assert sum(len(update) for _, update in updates) == numel
            assert all(float(update.abs().max()) <= 1 for _, update in updates)


@pytest.mark.parametrize("peers", [2, 3, 4, 7])
@pytest.mark.parametrize("majority", [True, False])
def test_rounds_are_those_of_the_formulas_and_count_their_bytes(peers: int, majority: bool) -> None:
    """Each peer has seen another part of the values; the first ones none has seen."""
    rule = LionRule(b1=0.8, b2=0.95, wd=0.1)
    rounds = Rounds(lambda: LionStrategy(N, rule, majority), torch.ones(N), peers)
    rng = np.random.default_rng(peers)
    momenta, weights = np.zeros((peers, N)), np.ones(N)
    unseen = np.arange(N) < 1000 * rng.integers(1, 15, (peers, 1))
    for number in range(1, 6):
        gradients = np.where(unseen | (rng.random((peers, N)) < 0.1), 0, rng.normal(size=(peers, N)))
        gradients = gradients.astype(np.float32)
        ballots = np.sign(0.8 * momenta + 0.2 * gradients)
        momenta = 0.95 * momenta + 0.05 * gradients
        total = sum(heard(ballot, number) for ballot in ballots)
        weights = weights - 0.01 * ((np.sign(total) if majority else total / peers) + 0.1 * weights)
        rounds.exchange(list(torch.from_numpy(gradients)), tokens=[10**k for k in range(peers)], lr=0.01)
        assert np.abs(rounds.tensors[0].numpy() - weights).max() < 1e-6
    assert rounds.bytes_up == pytest.approx(N * (1 + 1 / 64) / 8, rel=3e-3)
    bits = 1.6 if majority else (2 * peers).bit_length()
    assert rounds.bytes_down == pytest.approx(N * bits / 8, rel=3e-3)


@pytest.mark.parametrize("majority", [True, False])
def test_values_without_gradient_do_not_drift(majority: bool) -> None:
    """The embedding of an unseen word stays where it is, as a whole; single values go to and fro by one step."""
    rounds = Rounds(lambda: LionStrategy(N, LionRule(), majority), torch.ones(N), 3)
    unseen, single = slice(0, 64 * 150), slice(64 * 150, N, 5)
    lr = 2.0**-7
    for step in range(1, 41):
        gradients = [torch.randn(N) for _ in range(3)]
        for gradient in gradients:
            gradient[unseen] = gradient[single] = 0
        rounds.exchange(gradients, lr=lr)
        assert torch.equal(rounds.tensors[0][unseen], torch.ones(64 * 150))
        moved = rounds.tensors[0][single] - 1
        assert torch.all(moved.abs() == (lr if step % 2 else 0))
        assert abs(float(moved.sum())) <= lr, "neighbours go opposite ways"
    assert float((rounds.tensors[0][64 * 150 + 1 :: 5] - 1).abs().mean()) > lr


@pytest.mark.parametrize("majority", [True, False])
def test_who_has_seen_a_word_decides_alone(majority: bool) -> None:
    rounds = Rounds(lambda: LionStrategy(N, LionRule(), majority), torch.zeros(N), 3)
    rounds.exchange([torch.ones(N), torch.zeros(N), torch.zeros(N)], lr=0.75)
    assert torch.all(rounds.tensors[0] == (-0.75 if majority else -0.25))


@pytest.mark.parametrize("coding", [MajorityCoding(128, 1), AverageCoding(128, 1)])
def test_a_result_with_too_many_votes_is_refused(coding: MajorityCoding) -> None:
    half = torch.cat([torch.ones(63), torch.zeros(65)])  # one 0 is sent as a sign
    messages, sent = [coding.up.encode(half)] * 3, [Sent(b"", 20.0, 1 / 3)] * 3  # they said 20 each, and cast 64
    coding.check_result([0], [coding.merge(0, messages, [1 / 3] * 3)], [Sent(b"", 64.0, 1 / 3)] * 3)
    with pytest.raises(ProtocolViolation, match="more votes than were cast"):
        coding.check_result([0], [coding.merge(0, messages, [1 / 3] * 3)], sent)
    if isinstance(coding, AverageCoding):
        with pytest.raises(ProtocolViolation, match="other voters"):
            coding.check_result([0], [coding.merge(0, messages[:2], [0.5] * 2)], sent)
