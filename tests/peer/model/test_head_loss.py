"""The loss a part of the tokens at a time, against all logits at once in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peer.footprint import device as footprint
from peer.model.head_loss import VocabularyPart, head_losses
from tests.peer.devices import DEVICES
from tests.peer.footprint.held_memory import HeldMemory

TOKENS, WIDTH, VOCAB = 700, 12, 40


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts, of which the last is smaller."""
    monkeypatch.setattr(footprint, "_PART_BYTES", 300 * 4 * VOCAB)


def inputs(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, WIDTH, generator=random).to(device) for rows in (TOKENS, VOCAB))
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=random).to(device)


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    losses = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    of_hidden, of_weight = torch.autograd.grad(losses.sum(), [hidden, weight])
    return losses.detach(), of_hidden, of_weight


def distance(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("autocast", "bound"), [(False, 1e-6), (True, 1e-2)])
def test_losses_and_gradients_are_those_of_all_logits_at_once(device: str, autocast: bool, bound: float) -> None:
    hidden, weight, targets = inputs(device)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        total, losses = head_losses(hidden, weight, targets)
    (total / TOKENS).backward()
    exact, of_hidden, of_weight = reference(hidden.detach(), weight.detach(), targets)
    assert losses.dtype == total.dtype == torch.float32 and not losses.requires_grad
    assert distance(losses, exact) < bound and distance(total.detach(), exact.sum()) < bound
    assert hidden.grad is not None and weight.grad is not None
    assert distance(hidden.grad * TOKENS, of_hidden) < bound and distance(weight.grad * TOKENS, of_weight) < bound


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    hidden, weight, targets = inputs()
    learns = (weight if frozen == "hidden" else hidden).requires_grad_()
    total, _ = head_losses(hidden, weight, targets)
    total.backward()
    exact = reference(hidden.detach(), weight.detach(), targets)
    assert learns.grad is not None and distance(learns.grad, exact[2 if frozen == "hidden" else 1]) < 1e-6


def test_without_a_graph_only_losses_are_computed() -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_()
    with torch.no_grad():
        total, losses = head_losses(hidden, weight, targets)
    assert not total.requires_grad and distance(losses, reference(hidden, weight.detach(), targets)[0]) < 1e-6


def test_a_hidden_state_that_is_not_finite_shows_in_the_loss() -> None:
    hidden, weight, targets = inputs()
    hidden[5, 0] = math.nan
    total, losses = head_losses(hidden, weight, targets)
    assert math.isnan(float(total)) and int(losses.isnan().sum()) == 1


def test_logits_never_exist_whole() -> None:
    """The largest tensor that is made is one of a part."""
    hidden, weight, targets = inputs()
    weight.requires_grad_()
    with HeldMemory() as memory:
        total, _ = head_losses(hidden, weight, targets)
        total.backward()
    assert memory.largest == 300 * VOCAB < TOKENS * VOCAB


def test_a_vocabulary_that_is_cut_gives_the_same_loss_and_gradients() -> None:
    """Two threads with a half of the head each, whose logits exist a part of the tokens at a time, too."""
    hidden, weight, targets = inputs()
    hidden *= 100  # exponentials of such logits overflow unless the largest one of both parts is taken off
    cut, met, given = VOCAB // 2, Barrier(2), dict[int, Tensor]()

    def reduced(number: int, reduce: Callable[[Tensor, Tensor], Tensor], values: Tensor) -> Tensor:
        given[number] = values
        met.wait(30)
        result = reduce(given[0], given[1])
        met.wait(30)
        return result

    def compute(number: int) -> tuple[Tensor, Tensor, Tensor]:
        mine, own = (weight[cut:] if number else weight[:cut]).requires_grad_(), hidden.clone().requires_grad_()
        part = VocabularyPart(cut * number, *(partial(reduced, number, one) for one in (torch.maximum, torch.add)))
        total, losses = head_losses(own, mine, targets, part)
        total.backward()
        assert own.grad is not None and mine.grad is not None
        return losses, own.grad, mine.grad

    with ThreadPoolExecutor(2) as threads:
        (losses, of_hidden, low), (others, of_hidden_too, high) = threads.map(compute, range(2))
    exact = reference(hidden, weight, targets)
    assert torch.equal(losses, others) and distance(losses, exact[0]) < 1e-6
    assert distance(of_hidden + of_hidden_too, exact[1]) < 1e-6 and distance(torch.cat([low, high]), exact[2]) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_targets_with_a_mark_have_no_loss_and_no_gradient(device: str) -> None:
    hidden, weight, targets = inputs(device)
    counts = torch.rand(TOKENS, generator=torch.Generator().manual_seed(8)).to(device) < 0.4
    hidden.requires_grad_()
    weight.requires_grad_()
    total, losses = head_losses(hidden, weight, torch.where(counts, targets, -1 - targets), marked=True)
    total.backward()
    exact_hidden, exact_weight = (one.detach().double().requires_grad_() for one in (hidden, weight))
    wanted = torch.where(counts, targets, -100)
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, wanted, reduction="none", ignore_index=-100)
    exact.sum().backward()
    assert not losses[~counts].any() and distance(losses, exact.detach()) < 1e-6
    for mine, theirs in ((hidden, exact_hidden), (weight, exact_weight)):
        assert mine.grad is not None and theirs.grad is not None
        assert distance(mine.grad, theirs.grad) < 1e-6
    everything = torch.ones_like(counts)
    for marked in (False, True):  # without a mark the two are the same bits
        again = head_losses(hidden.detach(), weight.detach(), torch.where(everything, targets, -1), marked=marked)
        assert torch.equal(again[1], head_losses(hidden.detach(), weight.detach(), targets)[1])
