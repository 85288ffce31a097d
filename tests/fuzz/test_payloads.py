"""Mutated payloads of every codec and method: exactly the right size and finite values, or a ProtocolViolation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from optim.codecs import CODECS
from optim.codecs.interface import Codec
from optim.config import METHODS, CodecConfig
from optim.schedule import RoundInfo
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig, ModelConfig
from peer.errors import ProtocolViolation
from peer.model.layout import FlatLayout
from swarm.pipeline.activations import ActivationCode
from tests.fuzz.support.guard import MUTATIONS, Trial, chance_for, no_growth
from tests.fuzz.support.mutations import flip, of_bytes

SIZES = (1, 63, 256, 4096, 4097, 9001)
MODEL = ModelConfig(vocab_size=32, hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, max_seq_len=16)
INNER = InnerConfig(lr=1e-3, batch_size=1, total_steps=10)
ROUND = RoundInfo(round=1, step=0, lr=1e-3)
ACTIVATIONS = ("int8", "int4", "fp16", "none")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small vectors cost less on one thread than threads cost each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def codecs() -> dict[str, Codec]:
    return {**CODECS, **{f"activations {name}": ActivationCode(name).codec for name in ACTIVATIONS}}  # type: ignore[arg-type]


def wires() -> dict[str, tuple[str, CodecConfig]]:
    """Return each method of training in rounds and, of DiLoCo, each way to code its updates."""
    found = {name: (name, CodecConfig()) for name in METHODS if name != "gossip"}
    for up in ("powersgd", "lgreco"):
        found[f"diloco {up}"] = ("diloco", CodecConfig(up=up, rank=2))
    return found


@pytest.mark.parametrize("count", MUTATIONS)
@pytest.mark.parametrize("name", sorted(codecs()))
def test_codecs(name: str, count: int) -> None:
    codec, chance = codecs()[name], chance_for(name)
    torch.manual_seed(0)
    valid = {size: codec.encode(torch.randn(size)).numpy().tobytes() for size in SIZES}
    trial = Trial(name, (ProtocolViolation,))
    with no_growth():
        for number in range(count):
            size = chance.choice(SIZES)
            change = flip if chance.random() < 0.6 else lambda chance, data: of_bytes(chance, data, data[::-1])
            data = change(chance, valid[size])

            def decode(data: bytes, size: int = size) -> None:
                out = codec.decode(data, size)
                assert out.shape == (size,) and bool(torch.isfinite(out).all())
                assert len(data) == codec.encoded_size(size)
                assert 0 <= codec.decoded_sqnorm(data, size) < float("inf")

            trial.run(number, data, decode)
    assert trial.refused and trial.taken


@pytest.mark.parametrize("count", MUTATIONS)
@pytest.mark.parametrize("name", sorted(wires()))
def test_methods(name: str, count: int) -> None:
    method, codec = wires()[name]
    chance, layout = chance_for(name), FlatLayout.of(MODEL)
    torch.manual_seed(0)
    needed = {"batch": 1} if method == "allreduce" else {"steps": 4}
    strategy = build_strategy(METHODS[method](**needed), codec, layout, INNER)
    state = [torch.randn(layout.numel), *(torch.zeros(layout.numel) for _ in strategy.shared)]
    coding = strategy.coding(ROUND, state)
    product = torch.randn(sum(place.stop - place.start for place in coding.places))
    sent = [torch.empty(coding.message_bytes(index), dtype=torch.uint8) for index in range(coding.count)]
    strategy.encode(ROUND, coding, product, sent)
    merged = [coding.merge(index, [message, message], [0.5, 0.5]) for index, message in enumerate(sent)]
    trial = Trial(name, (ProtocolViolation,))

    def as_owner(data: bytes, index: int) -> None:
        assert 0 <= coding.message_sqnorm(index, data) < float("inf")
        coding.merge(index, [data, sent[index]], [0.5, 0.5])

    def as_member(data: bytes, index: int) -> None:
        for _, values in coding.updates(index, data):
            assert bool(torch.isfinite(values).all())

    with no_growth():
        for number in range(count):
            index, owner = chance.randrange(coding.count), chance.random() < 0.5
            data = (sent if owner else merged)[index].numpy().tobytes()
            data = flip(chance, data) if chance.random() < 0.7 else of_bytes(chance, data, data[::-1])
            work = as_owner if owner else as_member
            trial.run(number, data, lambda data, work=work, index=index: work(data, index))  # type: ignore[misc]
