"""Dropout before an adapter, against the formula in plain torch, and where a pass is cut or repeated."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F

from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerRun, InnerTrainer, run_inner
from peer.config import TARGETS, AdapterConfig
from peer.footprint.layout import Layout
from peer.footprint.parameters import base_of
from peer.footprint.step_size import StepSize
from peer.footprint.workload import Recompute
from peer.ipc.stage_spec import MicroBatch
from peer.model.decoder import AdaptedLinear, Decoder
from peer.model.dropout import drop
from peer.model.frozen_weights import FrozenWeights
from peer.model.layout import FlatLayout, init_flat, join_flat
from peer.parallel.rank_model import RankModel
from peer.parallel.ranks import Ranks
from tests.peer.support.stage_harness import INNER, MODEL, SPLITS, open_stages, relative

RATE = 0.25
TUNED = msgspec.structs.replace(MODEL, adapter=AdapterConfig(rank=3, alpha=6.0, targets=TARGETS, dropout=RATE))
SAMPLES = [40, 41, 42, 43]
TOKENS = torch.randint(0, MODEL.vocab_size, (4, 13), generator=torch.Generator().manual_seed(3))


def frozen() -> FrozenWeights:
    return FlatLayout.of(base_of(TUNED)).views(init_flat(base_of(TUNED), seed=1))


def start() -> torch.Tensor:
    """Return an adapter of which B is not zero."""
    draw = torch.Generator().manual_seed(4)
    return init_flat(TUNED, seed=2) + 0.05 * torch.randn(FlatLayout.of(TUNED).numel, generator=draw)


def trainer(sequences: int = 4, recompute: Recompute = "none") -> InnerTrainer:
    found = InnerTrainer(TUNED, INNER, resolve_device("cpu"), StepSize(sequences, recompute), base=frozen())
    found.local.copy_(start())
    return found


def gradient(of: InnerTrainer, samples: list[int]) -> torch.Tensor:
    of.begin_gradient()
    of.add_gradient(TOKENS, samples)
    return of.gradient.clone()


def test_the_share_that_is_dropped_and_the_mean_are_those_of_the_rate() -> None:
    x = torch.full((2, 50, 400), 3.0)
    out = drop(x, torch.tensor([5, 6]), "layers.0.mlp.up_proj", RATE)
    assert set(out.unique().tolist()) == {0.0, 4.0}
    assert float((out == 0).float().mean()) == pytest.approx(RATE, abs=0.01)
    assert float(out.mean()) == pytest.approx(3, abs=0.03)


def test_samples_and_layers_have_noise_of_their_own_wherever_they_stand() -> None:
    x = torch.ones(2, 20, 30)
    both = drop(x, torch.tensor([5, 1 << 40]), "a", RATE)
    assert torch.equal(both[1:], drop(x[:1], torch.tensor([1 << 40]), "a", RATE))
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(both, drop(x, torch.tensor([5, 1 << 40]), "b", RATE))


def test_a_layer_is_the_formula_with_its_gradients() -> None:
    """y = W x + alpha / rank B A (m x) / (1 - rate), in float64."""
    decoder = Decoder(TUNED, start(), base=frozen())
    layer = decoder.get_submodule("layers.1.mlp.down_proj")
    assert isinstance(layer, AdaptedLinear)
    x = torch.randn(2, 6, MODEL.intermediate_size, generator=torch.Generator().manual_seed(8)).requires_grad_()
    decoder.samples = torch.tensor([7, 9])
    mask = (drop(torch.ones_like(x), decoder.samples, "layers.1.mlp.down_proj", RATE) > 0).double()
    ours = layer(x)
    ours.square().sum().backward()
    wide = x.detach().double().requires_grad_()
    a, b = (weight.detach().double().requires_grad_() for weight in (layer.lora_A.weight, layer.lora_B.weight))
    theirs = F.linear(wide, layer.weight.double()) + 2.0 * F.linear(F.linear(wide * mask / (1 - RATE), a), b)
    theirs.square().sum().backward()
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    for found, wanted in ((x.grad, wide.grad), (layer.lora_A.weight.grad, a.grad), (layer.lora_B.weight.grad, b.grad)):
        assert found is not None and wanted is not None
        assert relative(found, wanted) < 1e-5


@pytest.mark.parametrize(("sequences", "recompute"), [(1, "none"), (3, "none"), (4, "full"), (4, "selective")])
def test_smaller_and_repeated_passes_drop_the_same(sequences: int, recompute: Recompute) -> None:
    wanted = gradient(trainer(), SAMPLES)
    assert relative(gradient(trainer(sequences, recompute), SAMPLES), wanted) < 1e-5
    assert relative(gradient(trainer(), SAMPLES[::-1]), wanted) > 0.05


@pytest.mark.parametrize("at_once", [None, 1])
def test_ranks_drop_what_one_device_drops(at_once: int | None) -> None:
    """The second one has a row less, and makes its pass for nothing."""
    whole, total = trainer(), torch.zeros(FlatLayout.of(TUNED).numel)
    whole.begin_gradient()
    whole.add_gradient(TOKENS[:3], SAMPLES[:3])
    for rank in range(2):
        model = RankModel(TUNED, Ranks(Layout(replicate=2), rank, torch.device("cpu")), None, frozen())
        model.import_from(start())
        model.add_up(TOKENS[:3], at_once, SAMPLES[:3])
        total += model.gradient
    assert relative(total, whole.gradient) < 1e-5


def test_an_inner_run_drops_and_an_evaluation_does_not() -> None:
    run = InnerRun(iter(SAMPLES), 0, 60.0, 1, lambda steps: False, "gradient")
    dropped, plain = trainer(), trainer()
    run_inner(dropped, lambda numbers: TOKENS, run)
    assert torch.equal(dropped.gradient, gradient(plain, SAMPLES))
    before = plain.evaluate([TOKENS], lambda: None)
    assert relative(gradient(plain, SAMPLES), gradient(plain, [])) > 0.05
    assert plain.evaluate([TOKENS], lambda: None) == before


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_drop_what_the_whole_model_drops(recompute: bool) -> None:
    wanted = gradient(trainer(), SAMPLES)
    chain = open_stages(SPLITS[3], TUNED, flat=start(), base=frozen(), recompute=recompute)
    x, seed = TOKENS[:, :-1], None
    for index, stage in enumerate(chain):
        targets = TOKENS[:, 1:] if stage.spec.is_last else None
        x = stage.forward(MicroBatch("a", index, 0, sample=SAMPLES[0]), x, targets)
    for index in reversed(range(len(chain))):
        seed = chain[index].backward(MicroBatch("a", index, 0, sample=SAMPLES[0]), seed)
    parts = [stage.gradient.mean() for stage in chain]
    assert relative(join_flat(TUNED, parts, SPLITS[3]), wanted) < 1e-4


def test_an_evaluation_of_stages_drops_nothing() -> None:
    plain = msgspec.structs.replace(MODEL, adapter=AdapterConfig(rank=3, alpha=6.0, targets=TARGETS))
    losses = []
    for model in (TUNED, plain):
        (stage,) = open_stages(SPLITS[1], model, flat=start(), base=frozen())
        losses.append(stage.forward(MicroBatch("a", 0, 0), TOKENS[:, :-1], TOKENS[:, 1:], keep=False))
    assert torch.equal(*losses)
