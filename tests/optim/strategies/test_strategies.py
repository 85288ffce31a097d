"""What every method's strategy promises: fragments, clipping, the order of senders, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim import config
from optim.strategies.registry import build_strategy, shared_vectors
from peer.errors import ConfigError, ProtocolViolation
from tests.optim.support.rounds import FP32, INNER, LAYOUT, Rounds, encoded, flat
from tests.optim.support.trajectory import K, apart, initial

METHODS: dict[str, config.OuterConfig] = {
    "diloco": config.DilocoConfig(steps=5),
    "streaming": config.StreamingConfig(steps=6, fragments=2),
    "eager": config.EagerConfig(steps=5),
    "demo": config.DemoConfig(topk=3, chunk=4),
    "sparseloco": config.SparseLocoConfig(steps=5, topk=4, chunk=4),
    "lion, majority": config.LionConfig(),
    "lion, average": config.LionConfig(vote="average"),
    "adamw": config.AllReduceConfig(batch=16),
    "lamb": config.AllReduceConfig(batch=16, optimizer="lamb"),
}


def test_streaming_steps_one_fragment_a_round(short_slices: None) -> None:
    """Strided blocks, each with a momentum of its own and half of the embedding's rows; everything else stays as it
    is."""
    codec = config.CodecConfig(up="fp32", down="fp32")
    method = config.StreamingConfig(steps=6, fragments=2, lr=0.4, momentum=0.9)
    rounds = Rounds(lambda: build_strategy(method, codec, LAYOUT, INNER), flat(initial()), K)
    half = len(initial()["embed"]) // 2
    rows = [slice(0, half), slice(half, None)]
    everything = slice(None)
    fragments = [{"embed": rows[b], f"blocks.{b}.w": everything, f"blocks.{b}.b": everything} for b in (0, 1)]
    theta, velocity = initial(), {n: np.zeros_like(v) for n, v in initial().items()}
    for number in range(6):
        products = [torch.randn(LAYOUT.numel) for _ in range(K)]
        rounds.exchange(products)
        for n, at in fragments[number % 2].items():
            delta = sum(LAYOUT.views(p)[n].double().numpy()[at] for p in products) / K
            velocity[n][at] = 0.9 * velocity[n][at] + delta
            theta[n][at] = theta[n][at] - 0.4 * (delta + 0.9 * velocity[n][at])
        ours = {n: v.double().numpy() for n, v in LAYOUT.views(rounds.tensors[0]).items()}
        assert apart([ours], [theta]) < 1e-6


def test_the_large_batch_step_clips_and_decays_as_a_worker_does() -> None:
    """torch's own AdamW with its own clip; only matrices decay."""
    strategy = build_strategy(METHODS["adamw"], FP32, LAYOUT, INNER)
    rounds = Rounds(lambda: strategy, flat(initial()), peers=1)
    leaves = {n: v.clone().requires_grad_() for n, v in LAYOUT.views(rounds.tensors[0]).items()}
    groups = [
        {"params": [v for v in leaves.values() if (v.dim() > 1) == decays], "weight_decay": 0.1 if decays else 0.0}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=INNER.betas, eps=INNER.eps)
    for step in range(20):
        grads = torch.randn(LAYOUT.numel) * (0.01 if step % 3 else 1)
        for name, g in LAYOUT.views(grads).items():
            leaves[name].grad = g.clone()
        torch.nn.utils.clip_grad_norm_(leaves.values(), INNER.clip_norm)
        adamw.step()
        rounds.exchange([grads], lr=1e-2)
    theirs = torch.cat([v.detach().reshape(-1) for v in leaves.values()])
    assert torch.allclose(rounds.tensors[0], theirs, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "codec"),
    [(name, config.CodecConfig()) for name in METHODS]
    + [("diloco", config.CodecConfig(up=up)) for up in ("fp32", "lgreco", "topk", "sign", "ternary")]
    + [(name, config.CodecConfig(up="powersgd", rank=1)) for name in ("diloco", "streaming", "lamb")],
)
def test_the_order_of_senders_does_not_change_a_bit(name: str, codec: config.CodecConfig) -> None:
    method = METHODS[name]
    torch.manual_seed(4)
    rounds = [Rounds(lambda: build_strategy(method, codec, LAYOUT, INNER), flat(initial()), K) for _ in range(2)]
    rounds[1].order = [2, 0, 3, 1]
    for _ in range(4):
        products, tokens = [torch.randn(LAYOUT.numel) * 0.1 for _ in range(K)], [100, 120, 90, 300]
        for one in rounds:
            torch.manual_seed(9)  # ternary slices are random
            one.exchange(products, tokens, lr=1e-2)
        assert all(torch.equal(a, b) for a, b in zip(rounds[0].tensors, rounds[1].tensors, strict=True))
    assert not torch.equal(rounds[0].tensors[0], flat(initial()))


@pytest.mark.parametrize(
    ("name", "codec"),
    [(name, config.CodecConfig()) for name in METHODS]
    + [("diloco", config.CodecConfig(up=up, rank=1)) for up in ("topk", "sign", "powersgd", "lgreco")],
)
def test_a_product_that_is_not_finite_is_refused_and_changes_nothing(name: str, codec: config.CodecConfig) -> None:
    spoiled, clean = (build_strategy(METHODS[name], codec, LAYOUT, INNER) for _ in range(2))
    state = [torch.zeros(LAYOUT.numel)] * (1 + len(spoiled.shared))
    rounds = Rounds(lambda: clean, state[0], peers=1)
    coding = spoiled.coding(rounds.round_info(0.1), state)
    product = torch.randn(LAYOUT.numel)
    bad = product.clone()
    bad[coding.places[-1].stop - 1] = torch.inf
    with pytest.raises(ProtocolViolation, match="diverged"):
        encoded(spoiled, rounds.round_info(0.1), coding, bad)
    after, without = (encoded(r, rounds.round_info(0.1), coding, product)[0] for r in (spoiled, clean))
    assert all(torch.equal(a, b) for a, b in zip(after, without, strict=True))


@pytest.mark.parametrize("name", ["demo", "sparseloco", "lion, average"])
def test_methods_with_own_packing_take_no_codec(name: str) -> None:
    with pytest.raises(ConfigError, match="leave the codec section out"):
        build_strategy(METHODS[name], config.CodecConfig(up="int4"), LAYOUT, INNER)


def test_gossip_is_no_strategy() -> None:
    with pytest.raises(ValueError, match="engine of its own"):
        build_strategy(config.GossipConfig(steps=5), config.CodecConfig(), LAYOUT, INNER)


def test_gossip_alone_has_no_common_state() -> None:
    assert [name for name, kind in config.METHODS.items() if not kind.has_common_state] == ["gossip"]


def test_gossip_refuses_two_bits_for_its_weights() -> None:
    with pytest.raises(ConfigError, match="whole weights"):
        shared_vectors(config.GossipConfig(), config.CodecConfig(down="two_bit"), LAYOUT, INNER)
    assert shared_vectors(config.GossipConfig(), config.CodecConfig(up="two_bit"), LAYOUT, INNER) == ()
