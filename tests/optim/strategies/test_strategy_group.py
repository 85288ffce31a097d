"""The strategies' in-memory group against the algorithms' group: two drivers of one set of formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.training.strategy_group import Overlap, StrategyGroup
from optim import config
from optim.algorithms.fragments import fragment_spans
from optim.algorithms.large_batch import LargeBatchStep
from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import get_codec
from optim.strategies.allreduce import AllReduceStrategy
from optim.strategies.dense import DenseFormat
from optim.strategies.diloco import DilocoStrategy
from optim.strategies.interface import OuterStrategy
from optim.strategies.registry import build_strategy
from peer.compute.optimizer import InnerSpec
from peer.config import InnerConfig
from tests.optim.reference.group import Group
from tests.optim.support.layouts import layout_of

K, STEPS, LR = 4, 12, 1e-2
SHAPES = {"embed": (64, 24), "blocks.0.w": (24, 40), "blocks.0.b": (24,), "blocks.1.w": (40, 24), "norm": (24,)}
"""Less than one slice: the strategies merge each slice in its own order, `Group` a whole vector in one order."""
FRAGMENTS = [["embed", "blocks.0.w", "blocks.0.b"], ["blocks.1.w", "norm"]]
LAYOUT = layout_of({name: torch.empty(shape) for name, shape in SHAPES.items()})
INNER = InnerConfig(lr=LR, batch_size=4, total_steps=100, weight_decay=0.1)
FP32, OWN = config.CodecConfig(up="fp32", down="fp32"), config.CodecConfig()
Build = Callable[[], OuterStrategy]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(group: Group | StrategyGroup) -> torch.Tensor:
    for step in range(STEPS):
        group.step([tensors(100 * step + k) for k in range(K)])
    return torch.cat([value.flatten() for k in range(K) for value in group.params(k).values()])


def registered(method: config.OuterConfig, codec: config.CodecConfig = FP32) -> Build:
    return lambda: build_strategy(method, codec, LAYOUT, INNER)


def coded(up: Any, down: Any) -> Build:
    return registered(config.DilocoConfig(steps=4), config.CodecConfig(up=up, down=down))


def wire(fragments: list[list[slice]]) -> DenseFormat:
    return DenseFormat(fragments, get_codec("fp32"), get_codec("fp32"))


def streaming() -> OuterStrategy:
    return DilocoStrategy(wire([fragment_spans(LAYOUT, names) for names in FRAGMENTS]), DilocoOuter())


def large_batch(optimizer: Any) -> Build:
    return lambda: AllReduceStrategy(LAYOUT, wire([[slice(0, LAYOUT.numel)]]), LargeBatchStep(optimizer))


@pytest.mark.parametrize(
    ("algo", "cfg", "build", "every", "overlap"),
    [
        ("diloco", {"H": 4}, coded("fp32", "fp32"), 4, Overlap()),
        ("diloco", {"H": 4, "codec": "int8", "codec_down": "int8"}, coded("int8", "int8"), 4, Overlap()),
        ("diloco", {"H": 4, "codec": "topk", "codec_down": "nf4"}, coded("topk", "nf4"), 4, Overlap()),
        ("streaming", {"H": 4, "fragments": FRAGMENTS, "tau": 1, "alpha": 0.5}, streaming, 2, Overlap(1, 0.5)),
        ("demo", {"lr": LR, "wd": 0.1}, registered(config.DemoConfig(), OWN), 1, Overlap()),
        ("sparseloco", {"H": 4}, registered(config.SparseLocoConfig(steps=4), OWN), 4, Overlap()),
        ("lion", {"lr": LR, "wd": 0.1}, registered(config.LionConfig(), OWN), 1, Overlap()),
        (
            *("lion", {"lr": LR, "wd": 0.1, "vote": "average"}),
            *(registered(config.LionConfig(vote="average"), OWN), 1, Overlap()),
        ),
        ("allreduce", {"accumulate": 2}, large_batch("adamw"), 2, Overlap()),
        ("allreduce", {"accumulate": 2}, large_batch("lamb"), 2, Overlap()),
    ],
)
def test_a_strategy_makes_the_bits_of_its_algorithm(
    algo: str, cfg: dict[str, Any], build: Build, every: int, overlap: Overlap
) -> None:
    strategy = build()
    inner = {"lr": LR}
    if isinstance(strategy, AllReduceStrategy):
        inner["optimizer"] = strategy.rule.optimizer  # type: ignore[assignment]
    ours = StrategyGroup(build, tensors(1), K, every, InnerSpec(**inner), overlap=overlap)  # type: ignore[arg-type]
    assert torch.equal(trained(ours), trained(Group(algo, tensors(1), K, inner=inner, **cfg)))
    assert ours.bytes_up > 0 < ours.bytes_down


def test_eager_updates_differ_from_the_papers_form_only_by_rounding() -> None:
    outer = DilocoOuter(0.3, 0.5)
    build = registered(config.EagerConfig(steps=4))
    ours = StrategyGroup(build, tensors(1), K, 4, InnerSpec(lr=LR), overlap=Overlap(eager=outer))
    theirs = trained(Group("eager", tensors(1), K, inner={"lr": LR}, H=4, outer_lr=0.3, outer_momentum=0.5))
    assert torch.allclose(trained(ours), theirs, rtol=0, atol=1e-6)


def test_the_gate_weighs_equal_work_alike() -> None:
    plain, gated = (
        StrategyGroup(coded("int8", "int8"), tensors(1), K, 4, InnerSpec(lr=LR), tokens=tokens) for tokens in (None, 64)
    )
    assert torch.equal(trained(plain), trained(gated))
