"""The network's path, in fp32 and through bytes, against float64 re-derivations of each method's formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from optim import config
from optim.algorithms.demo import DemoScheme
from optim.algorithms.large_batch import LargeBatchStep
from optim.algorithms.lion import LionRule
from optim.algorithms.outer_step import DilocoOuter
from optim.algorithms.sparseloco import SparseLocoScheme
from optim.codecs import get_codec
from optim.strategies import dense, sparse
from optim.strategies.allreduce import AllReduceStrategy
from optim.strategies.dense import DenseFormat
from optim.strategies.diloco import DilocoStrategy
from optim.strategies.interface import OuterStrategy
from optim.strategies.lion import LionStrategy
from optim.strategies.registry import build_strategy
from optim.strategies.sparse import DemoStrategy, SparseLocoStrategy
from peer.config import InnerConfig
from peer.errors import ConfigError, ProtocolViolation
from tests.optim.algorithms.test_methods_rounds import diloco_by_formula
from tests.optim.algorithms.test_methods_sparse import CHUNK, demo_by_formula, sparseloco_by_formula
from tests.optim.algorithms.test_methods_steps import LION, allreduce_by_formula, lion_by_formula
from tests.optim.support.layouts import layout_of
from tests.optim.support.rounds import Rounds, encoded, flat, trajectory
from tests.optim.support.trajectory import Arrays, K, apart, initial

CLOSE = 2e-5  # fp32, sixty steps
FP32 = get_codec("fp32")
LAYOUT = layout_of({name: torch.from_numpy(value) for name, value in initial().items()})
INNER = InnerConfig(lr=1e-2, batch_size=4, total_steps=100, weight_decay=0.1)
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


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices for a small problem, no parameter cut in two."""
    for module, name, value in [(dense, "SLICE_VALUES_MIN", 8), (dense, "SLICE_VALUES_MAX", 100)]:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sparse, "SLICE_VALUES_MAX", 100)


def wire() -> DenseFormat:
    return DenseFormat([[slice(0, LAYOUT.numel)]], FP32, FP32)


def distance(build: Callable[[], OuterStrategy], every: int, theirs: list[Arrays], lr: float = 0.0) -> float:
    return apart(trajectory(build, LAYOUT, every, lr), theirs)


def test_diloco(short_slices: None) -> None:
    assert distance(lambda: DilocoStrategy(wire(), DilocoOuter(0.7, 0.9)), 5, diloco_by_formula(5)) < CLOSE


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
        assert apart([ours], [theta]) < CLOSE


def test_demo(short_slices: None) -> None:
    scheme = DemoScheme(decay=0.99, topk=3, wd=0.1)
    assert len(DemoStrategy(LAYOUT, scheme, CHUNK)._coding.slices) > 2
    assert distance(lambda: DemoStrategy(LAYOUT, scheme, CHUNK), 1, demo_by_formula(), lr=2e-3) < CLOSE


@pytest.mark.parametrize("bins", [None, 4])
def test_sparseloco(short_slices: None, bins: int | None) -> None:
    scheme = SparseLocoScheme(topk=4, bins=bins, outer_lr=0.6, ef_decay=0.9)
    assert distance(lambda: SparseLocoStrategy(LAYOUT, scheme, CHUNK), 5, sparseloco_by_formula(bins, True)) < CLOSE


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_lion(short_slices: None, vote: str) -> None:
    def build() -> OuterStrategy:
        return LionStrategy(LAYOUT.numel, LionRule(LION["b1"], LION["b2"], LION["wd"]), vote == "majority")

    assert distance(build, 1, lion_by_formula(vote), LION["lr"]) < CLOSE


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_allreduce(short_slices: None, optimizer: str) -> None:
    rule = LargeBatchStep(optimizer)  # type: ignore[arg-type]
    assert distance(lambda: AllReduceStrategy(LAYOUT, wire(), rule), 2, allreduce_by_formula(optimizer), 1e-2) < CLOSE


def test_the_large_batch_step_clips_and_decays_as_a_worker_does() -> None:
    """torch's own AdamW with its own clip; only matrices decay."""
    strategy = build_strategy(METHODS["adamw"], config.CodecConfig(up="fp32", down="fp32"), LAYOUT, INNER)
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
