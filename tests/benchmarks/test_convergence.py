"""The convergence benchmark has a row for all that RUN.toml accepts, and computes what is missing."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch

from benchmarks.training import cloze, convergence, convergence_rows
from benchmarks.training.byte_task import SEQ, inner_config
from benchmarks.training.convergence_cell import Run
from benchmarks.training.demo_group import DemoGroup
from benchmarks.training.liars import LIES, liar
from benchmarks.training.rounds import Rounds
from optim import config
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig
from tests.optim.support.layouts import layout_of

RUNS = [run for table in convergence_rows.rows().values() for run in table.values()]


def values(struct: type, field: str) -> set[str]:
    return set(get_args(get_type_hints(struct)[field]))


@pytest.mark.parametrize("name", config.METHODS)
def test_every_method_has_a_row(name: str) -> None:
    assert any(type(run.method) is config.METHODS[name] for run in RUNS)


@pytest.mark.parametrize(
    ("struct", "field", "of"),
    [
        (config.CodecConfig, "up", lambda run: run.codec),
        (config.CodecConfig, "down", lambda run: run.codec),
        (config.DilocoConfig, "merge", lambda run: run.method),
        (config.DilocoConfig, "schedule", lambda run: run.method),
        (config.LionConfig, "vote", lambda run: run.method),
        (config.AllReduceConfig, "optimizer", lambda run: run.method),
    ],
)
def test_every_choice_has_a_row(struct: type, field: str, of: object) -> None:
    found = {getattr(of(run), field) for run in RUNS if isinstance(of(run), struct)}  # type: ignore[operator]
    assert found == values(struct, field)


def test_every_inner_optimizer_has_a_row() -> None:
    assert {inner_config(run.inner).optimizer for run in RUNS} == values(InnerConfig, "optimizer")


def test_only_missing_and_changed_cells_are_computed() -> None:
    (group, table), *_ = convergence_rows.rows().items()
    (name, run), (other, other_run), *_ = table.items()
    kept = {"settings": convergence.fingerprint(run)}
    figures = {"cells": {group: {name: {"0": kept}, other: {"0": {"settings": "of before"}}}}}
    found = convergence.missing(figures, [group], [name, other], 2, again=False)
    assert found == [(group, other, 0), (group, name, 1), (group, other, 1)]
    assert convergence.fingerprint(run) != convergence.fingerprint(other_run)
    assert len(convergence.missing(figures, [group], [name], 1, again=True)) == 1


def test_a_fingerprint_tells_liars_apart() -> None:
    method = config.DilocoConfig()
    assert len({convergence.fingerprint(Run(method, liars=n, lie=lie)) for n in (0, 1, 2) for lie in LIES}) == 9


def test_demos_authors_formulas_step_as_the_method_does() -> None:
    shapes = {"embed": (128, 96), "gain": (64,), "w": (176, 64)}
    layout = layout_of({name: torch.empty(shape) for name, shape in shapes.items()})
    inner = InnerConfig(lr=1e-2, batch_size=1, total_steps=10, weight_decay=0.0)
    method, zeros = config.DemoConfig(decay=0.9), torch.zeros(layout.numel)
    rounds = Rounds(lambda: build_strategy(method, config.CodecConfig(), layout, inner), zeros, 3)
    authors = DemoGroup(layout, zeros, 3, method.decay, method.topk, method.chunk)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        gradients = [torch.randn(layout.numel, generator=generator) for _ in range(3)]
        rounds.exchange(gradients, lr=1e-2)
        authors.step([layout.views(gradient) for gradient in gradients], 1e-2)
        assert float((rounds.tensors[0] - authors.theta).abs().max()) < 1e-6
    assert float(authors.theta.abs().max()) > 0.025


@pytest.mark.parametrize("lie", LIES)
def test_only_the_last_workers_lie(lie: str) -> None:
    honest = [torch.randn(50) for _ in range(8)]
    said = liar(lie, 3, 0)(honest)  # type: ignore[arg-type]
    assert len(said) == 8 and all(torch.equal(a, b) for a, b in zip(honest[:5], said[:5], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(honest[5:], said[5:], strict=True))


def test_a_cloze_task_has_one_right_word_among_four_of_its_length() -> None:
    text = b" ".join(b"%s is the %s of" % (a, b) for a, b in [(b"alpha", b"list"), (b"bravo", b"tree")] * 20)
    text += b" delta gamma omega form kind part " * 5
    drawn = cloze.draw(text, seed=1, count=30)
    assert torch.equal(drawn.tokens, cloze.draw(text, seed=1, count=30).tokens)
    for tokens, length in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True):
        words = [bytes(choice[-length:]) for choice in tokens]
        assert len(set(words)) == 4 and all(word.isalpha() for word in words)
        assert bytes(tokens[0]) in text and len({bytes(choice[:-length]) for choice in tokens}) == 1
        assert len(tokens[0]) == SEQ + 1
