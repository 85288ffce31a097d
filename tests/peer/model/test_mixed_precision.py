"""The scale of the loss, against torch's own; gradients of the head in fp16."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from peer.model.head_loss import head_losses
from peer.model.mixed_precision import GROWTH_INTERVAL, SCALE, SCALE_MIN, LossScaler, autocast

CPU = torch.device("cpu")


def test_the_scale_is_that_of_torch() -> None:
    """For the same gradients: also the unscaled ones, and whether a step is made with them."""
    theirs, mine, dice = GradScaler("cpu"), LossScaler(), random.Random(5)
    weights = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    scales = [SCALE]
    for step in range(3 * GROWTH_INTERVAL):
        theirs.scale(torch.zeros(()))  # makes its scale on first use
        bad = step in (0, 1, 50) or (step > GROWTH_INTERVAL * 2 and dice.random() < 0.01)
        gradient = torch.tensor([dice.uniform(-9, 9), dice.choice([float("inf"), float("nan")]) if bad else 1.0, 0.1])
        weights.grad = gradient.clone()
        theirs.unscale_(optimizer)
        mine.unscale_(gradient)
        finite = bool(gradient.isfinite().all())
        assert torch.equal(gradient[finite - 1 :: 2], weights.grad[finite - 1 :: 2])
        before = weights.detach().clone()
        theirs.step(optimizer)
        assert mine.update(finite)
        theirs.update()
        assert torch.equal(weights, before) != finite
        assert mine.scale == theirs.get_scale(), step
        scales.append(mine.scale)
    moves = [after / before for before, after in pairwise(scales) if after != before]
    assert moves.count(2.0) == 1 and moves.count(0.5) > 5


def test_the_scale_stays_a_finite_number_of_fp32() -> None:
    theirs, mine = GradScaler("cpu", init_scale=2.0**127, growth_interval=1), LossScaler(2.0**127)
    weights = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    theirs.scale(torch.zeros(()))
    weights.grad = torch.ones(1)
    theirs.step(optimizer)
    theirs.update()
    for _ in range(GROWTH_INTERVAL):
        assert mine.update(finite=True)
    assert mine.scale == theirs.get_scale() == 2.0**127


def test_below_the_least_scale_none_is_left_to_try() -> None:
    scaler, tries = LossScaler(), 0
    while scaler.update(finite=False):
        tries += 1
    assert scaler.scale == SCALE_MIN and 2.0**tries == SCALE / SCALE_MIN
    assert not scaler.update(finite=False)
    for _ in range(GROWTH_INTERVAL):
        assert scaler.update(finite=True)
    assert scaler.scale == 2 * SCALE_MIN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_the_head_keeps_small_gradients_by_the_weight_of_the_loss(dtype: torch.dtype | None) -> None:
    """Each wrong token has a probability of about 1e-9, which only fp16 rounds to zero. In fp32 and bf16 the weight
    changes no bit."""
    head = torch.eye(8).mul(20.0).requires_grad_()
    hidden = torch.eye(8)[:4].clone().requires_grad_()
    targets = torch.arange(4)
    found = []
    for weight in (1.0, 2.0**14, 2.0**60):
        with autocast(CPU, dtype):
            total, _ = head_losses(hidden, head, targets, weight=weight)
        seed = torch.tensor(weight)
        found.append([one / weight for one in torch.autograd.grad(total, [hidden, head], seed)])
    exact_hidden, exact_head = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    nll = nn.functional.cross_entropy(exact_hidden @ exact_head.T, targets, reduction="sum")
    exact = torch.autograd.grad(nll, [exact_hidden, exact_head])
    plain, scaled, beyond = found
    wrong = ~torch.eye(8, dtype=torch.bool)
    for index in range(2):
        assert exact[index].norm() > 0
        if dtype == torch.float16:
            at = wrong[: len(exact[index])]
            assert not plain[index].any() and not beyond[index].isfinite().all()
            torch.testing.assert_close(scaled[index][at].double(), exact[index][at], rtol=0.01, atol=0.0)
        else:
            assert torch.equal(plain[index], scaled[index]) and torch.equal(plain[index], beyond[index])
