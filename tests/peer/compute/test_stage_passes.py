"""Passes that do not count: exact, any number at a time, and with the weights of the previous epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from peer.compute.stage import Stage
from peer.errors import StageRefused
from peer.ipc.stage_spec import MicroBatch
from peer.model.layout import init_flat, split_flat
from tests.peer.support.stage_harness import (
    MODEL,
    SPLITS,
    ExactPass,
    backward,
    forward,
    open_stages,
    relative,
    token_batches,
    whole_gradient,
)

BOUND = 1e-5
STAGES = SPLITS[3]  # a first, a middle, and a last stage
WEIGHTS = [split_flat(MODEL, init_flat(MODEL, seed=seed), STAGES) for seed in range(3)]  # of the epochs 0, 1, 2
TOKENS = token_batches(1)[0]


class ForwardRequest:
    """An input of its own for a stage, run there and exactly."""

    def __init__(self, stage: Stage, seed: int, weights: Tensor, micro_batch: MicroBatch) -> None:
        self.stage, self.micro_batch = stage, micro_batch
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, MODEL.vocab_size, (3, 12), generator=generator)
        hidden = torch.randn(3, 12, MODEL.hidden_size, generator=generator)
        self.x = ids if stage.spec.is_first else hidden
        self.targets = ids if stage.spec.is_last else None
        self.seed = None if stage.spec.is_last else torch.randn(hidden.shape, generator=generator)
        self.exact = ExactPass(stage, weights, self.x, self.targets)

    def forward(self) -> None:
        out = self.stage.forward(self.micro_batch, self.x, self.targets)
        assert relative(out, self.exact.out.detach()) < BOUND

    def backward(self, **changes: object) -> Tensor:
        """The exact gradient of the weights."""
        of_input = self.stage.backward(msgspec.structs.replace(self.micro_batch, **changes), self.seed)
        exact_input, of_weights = self.exact.backward(self.seed)
        assert (of_input is None) == (exact_input is None)
        if of_input is not None and exact_input is not None:
            assert relative(of_input, exact_input) < BOUND
        return of_weights


def refused(reason: str, call: Callable[[], object]) -> None:
    with pytest.raises(StageRefused) as caught:
        call()
    assert caught.value.reason == reason, caught.value


def stages(**changes: Any) -> Iterator[tuple[int, Stage]]:
    return enumerate(open_stages(STAGES, **changes))


@pytest.mark.parametrize("recompute", [False, True])
def test_an_uncounted_pass_is_exact_and_changes_nothing(recompute: bool) -> None:
    """Before, while and after the same id is counted."""
    for index, stage in stages(recompute=recompute):
        counted = ForwardRequest(stage, 0, WEIGHTS[0][index], MicroBatch("a", index, 0))
        through = [
            ForwardRequest(stage, 1 + k, WEIGHTS[0][index], MicroBatch("a", index, 0, count=False, attempt=1 + k))
            for k in range(4)
        ]
        through[0].forward()
        through[0].backward()
        assert not stage.gradient.flat.any() and not stage.gradient.counted and not stage._seen
        counted.forward()
        through[1].forward()
        through[2].forward()
        through[1].backward()
        exact = counted.backward()
        through[2].backward()
        for _ in range(2):
            through[3].forward()
            through[3].backward()
        assert len(stage.held) == 0 and stage.held.size_bytes == 0
        assert relative(stage.gradient.flat, exact) < BOUND
        taken = stage.take_gradient(torch.empty(stage.layout.numel))
        assert (taken.micro_batches, taken.tokens) == (("a",), 36)


def test_passes_of_one_id_are_independent() -> None:
    """Each pass has its own input, so that a mix-up shows in its gradient."""
    for index, stage in stages():
        first, second = (
            ForwardRequest(stage, k, WEIGHTS[0][index], MicroBatch("a", index, 0, count=False, attempt=k))
            for k in range(2)
        )
        counted = ForwardRequest(stage, 2, WEIGHTS[0][index], MicroBatch("a", index, 0, attempt=2))
        for one in (first, counted, second):
            one.forward()
        again = MicroBatch("a", index, 0, count=False, attempt=1)
        other = MicroBatch("a", index, 0, attempt=3)
        for clash, words in ((again, "choose another attempt"), (other, "counts once")):
            with pytest.raises(StageRefused, match=words) as caught:
                stage.forward(clash, first.x, first.targets)
            assert caught.value.reason == "duplicate"
        assert stage.drop(first.micro_batch.key) and not stage.drop(first.micro_batch.key)
        refused("unknown", first.backward)
        second.backward()
        exact = counted.backward()
        assert relative(stage.gradient.flat, exact) < BOUND


def test_a_backward_may_drop_the_count_but_not_add_it() -> None:
    for index, stage in stages():
        given_up = ForwardRequest(stage, 0, WEIGHTS[0][index], MicroBatch("a", index, 0))
        through = ForwardRequest(stage, 1, WEIGHTS[0][index], MicroBatch("b", index, 0, count=False))
        for one in (given_up, through):
            one.forward()
        given_up.backward(count=False)
        refused("unknown", lambda: through.backward(count=True))  # noqa: B023
        through.backward()
        assert not stage.gradient.flat.any() and stage.gradient.tokens == 0
        given_up.forward()  # it has not been counted, so it may be now
        exact = given_up.backward()
        assert relative(stage.gradient.flat, exact) < BOUND and stage.gradient.tokens == 36


@pytest.mark.parametrize("recompute", [False, True])
def test_uncounted_passes_use_the_previous_weights(recompute: bool) -> None:
    """Without staleness: what counts is of this epoch; what passes through may be of the last one, and may have gone
    forward in it."""
    for index, stage in stages(recompute=recompute, previous=True):

        def of(epoch: int, attempt: int, count: bool = False) -> ForwardRequest:
            micro_batch = MicroBatch(f"{epoch}", index, epoch, count, attempt)  # noqa: B023
            return ForwardRequest(stage, 10 * epoch + attempt, WEIGHTS[epoch][index], micro_batch)  # noqa: B023

        through, counted = of(0, 0), of(0, 1, count=True)
        through.forward()
        counted.forward()
        stage.import_weights(WEIGHTS[1][index], epoch=1)
        through.backward()
        refused("epoch", counted.backward)  # too late to count
        counted.backward(count=False)
        late = of(0, 2)
        late.forward()
        late.backward()
        refused("epoch", of(0, 3, count=True).forward)

        through, counted = of(1, 0), of(1, 1, count=True)
        through.forward()
        counted.forward()
        through.backward()
        exact = counted.backward()
        assert relative(stage.gradient.flat, exact) < BOUND

        held = of(0, 4)
        held.forward()
        stage.import_weights(WEIGHTS[1][index], epoch=1)  # the same epoch again: the one before stays
        held.backward()
        held.forward()
        moved = stage.import_weights(WEIGHTS[2][index], epoch=2)
        assert (moved.expired, moved.uncounted) == (("0",), ("1",))
        crossed = of(1, 5)
        crossed.forward()
        crossed.backward()
        refused("epoch", held.forward)


def test_only_one_previous_epoch_is_kept() -> None:
    for index, stage in stages(previous=True):
        through = ForwardRequest(stage, 0, WEIGHTS[0][index], MicroBatch("a", index, 3, count=False))
        stage.import_weights(WEIGHTS[1][index], epoch=4)  # from 0: no peer has the weights of 3 here
        refused("epoch", through.forward)
        refused(
            "epoch", ForwardRequest(stage, 0, WEIGHTS[0][index], MicroBatch("a", index, 0, count=False)).forward
        )  # too old
        stage.step(0, torch.ones_like(stage.local), epoch=5)
        of_four = ForwardRequest(stage, 1, WEIGHTS[1][index], MicroBatch("b", index, 4, count=False))
        of_four.forward()
        stage.step(1, torch.ones_like(stage.local))  # within the epoch: its own weights move, not those before
        of_four.backward()
        stage.import_weights(WEIGHTS[0][index], epoch=3)  # back: the weights before 3 are unknown
        refused("epoch", ForwardRequest(stage, 2, WEIGHTS[0][index], MicroBatch("c", index, 2, count=False)).forward)
    for index, stage in stages():
        stage.import_weights(WEIGHTS[1][index], epoch=1)
        refused(
            "epoch", ForwardRequest(stage, 0, WEIGHTS[0][index], MicroBatch("a", index, 0, count=False)).forward
        )  # not kept


def test_counted_gradients_are_of_the_present_weights() -> None:
    for recompute in (False, True):
        for index, stage in stages(recompute=recompute, previous=True, staleness=1):
            stage.import_weights(WEIGHTS[1][index], epoch=1)
            counted = ForwardRequest(stage, 0, WEIGHTS[1][index], MicroBatch("a", index, 0))
            through = ForwardRequest(stage, 1, WEIGHTS[0][index], MicroBatch("a", index, 0, count=False, attempt=1))
            ahead = ForwardRequest(stage, 2, WEIGHTS[1][index], MicroBatch("b", index, 2, count=False))
            given_up = ForwardRequest(stage, 3, WEIGHTS[1][index], MicroBatch("c", index, 0))
            for one in (counted, through, ahead, given_up):
                one.forward()
            for one in (through, ahead):
                one.backward()
            given_up.backward(count=False)
            exact = counted.backward()
            assert relative(stage.gradient.flat, exact) < BOUND


def test_a_counted_backward_uses_the_new_weights() -> None:
    """Also if the weights of its forward are still held."""
    (stage,) = open_stages(SPLITS[1], previous=True, staleness=1)
    forward([stage], "a", TOKENS)
    new = init_flat(MODEL, seed=1)
    stage.import_weights(new, epoch=1)
    backward([stage], "a")
    assert relative(stage.gradient.mean(), whole_gradient(MODEL, new, [TOKENS])[1]) < BOUND


def test_an_evaluation_changes_nothing() -> None:
    """The gradients of micro-batches held meanwhile have the same bits."""
    plain, watched = (open_stages(SPLITS[2], previous=True) for _ in range(2))
    parts = split_flat(MODEL, init_flat(MODEL, seed=1), SPLITS[2])
    for chain in (plain, watched):
        for stage, part in zip(chain, parts, strict=True):
            stage.import_weights(part, epoch=1)
        forward(chain, "a", TOKENS, epoch=1)
        if chain is watched:
            held = [(stage.held.size_bytes, len(stage.held), dict(stage._seen)) for stage in chain]
            for name, epoch, count in (("a", 1, True), ("a", 0, False), ("b", 1, False)):
                x = TOKENS[:, :-1]
                for index, stage in enumerate(chain):
                    targets = TOKENS[:, 1:] if stage.spec.is_last else None
                    x = stage.forward(MicroBatch(name, index, epoch, count), x, targets, keep=False)
                flat = init_flat(MODEL, seed=epoch)
                assert float(x.mean()) == pytest.approx(whole_gradient(MODEL, flat, [TOKENS])[0], rel=BOUND)
            assert [(stage.held.size_bytes, len(stage.held), dict(stage._seen)) for stage in chain] == held
        backward(chain, "a", epoch=1)
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one.gradient.flat, other.gradient.flat)
