"""Ranks that share a model against one device that has it whole: the same flat vectors outward, from any layout."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from safetensors.torch import load_file, save_file

from peer.compute.inner_optimizer import AdamW
from peer.footprint.layout import ONE_DEVICE
from peer.footprint.optimizer_state import saved_bytes
from peer.model.decoder import Decoder, FlatLayout, init_flat
from peer.parallel.ranks import Ranks
from tests.peer.model.reference_loss import next_token_loss
from tests.peer.parallel.layout_ranks import (
    CASES,
    LAYOUTS,
    MODELS,
    NARROW,
    RATE,
    SOAK_CASES,
    SPEC,
    STEPS,
    batch,
)
from tests.peer.parallel.stage_scene import LAYOUTS as STAGE_LAYOUTS
from tests.peer.parallel.stage_scene import STAGES, StageScene
from tests.support.forking.forked import ForkedProcess

torch.set_num_threads(1)  # on tensors this small a second thread only waits for the first
pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]
ONE = Ranks(ONE_DEVICE, 0, torch.device("cpu"))
Found = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def start() -> Found:
    """Weights, and a state of AdamW as if a hundred steps had been made."""
    found: Found = {}
    for seed, (name, config) in enumerate(MODELS.items()):
        flat = init_flat(config, seed)
        layout = FlatLayout.of(config)
        random = torch.Generator().manual_seed(seed)
        optimizer = AdamW(SPEC, layout, flat)
        optimizer.mean.copy_(torch.randn(layout.numel, generator=random) * 1e-2)
        optimizer.square.copy_(torch.rand(layout.numel, generator=random) * 1e-3 + 1e-4)
        optimizer.steps = 100
        state = torch.zeros(saved_bytes("adamw", layout.shapes), dtype=torch.uint8)
        optimizer.save(state)
        found[f"{name}.weights"], found[f"{name}.state"] = flat, state
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start: Found) -> Path:
    """What four ranks, which come together anew for each layout, have written."""
    return trained(tmp_path_factory.mktemp("ranks"), start)


@pytest.fixture(scope="module")
def soak_folder(tmp_path_factory: pytest.TempPathFactory, start: Found) -> Path:
    """The same of `SOAK_CASES`."""
    return trained(tmp_path_factory.mktemp("ranks"), start, "soak")


def trained(folder: Path, start: Found, *cases: str) -> Path:
    save_file(start, folder / "start.safetensors")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ("tests.peer.parallel.layout_ranks", str(folder), *cases)
    with ForkedProcess(*command, stderr=PIPE, env=environment, cwd=ROOT, text=True) as parent:
        _, said = parent.communicate(timeout=300)
    assert parent.returncode == 0, said
    return folder


@pytest.fixture(scope="module")
def alone(start: Found) -> dict[str, Found]:
    """The same on one device, by the plain decoder."""
    return {name: _train_alone(name, start) for name in MODELS}


def _train_alone(name: str, start: Found) -> Found:
    config = MODELS[name]
    flat = start[f"{name}.weights"].clone()
    gradient = torch.zeros_like(flat)
    model = Decoder(config, flat)
    model.bind_gradients(gradient)

    def backward(step: int) -> tuple[float, float]:
        gradient.zero_()
        loss = next_token_loss(model(batch(step)[:, :-1]), batch(step))
        loss.backward()
        return float(loss.detach()), float(gradient.norm())

    figures = []
    for step in range(STEPS):
        loss, norm = backward(step)
        figures.append((loss, norm, loss))
        flat.sub_(gradient, alpha=RATE)
    stepped = flat.clone()
    optimizer = AdamW(SPEC, model.layout, flat)
    optimizer.load(start[f"{name}.state"])
    flat.copy_(start[f"{name}.weights"])
    backward(0)
    optimizer.step(flat, gradient)
    return {"figures": torch.tensor(figures, dtype=torch.float64), "stepped": stepped, "adam": flat}


@pytest.fixture(params=[*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in SOAK_CASES)], ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str, Found]:
    layout, model = request.param
    folder = request.getfixturevalue("soak_folder" if request.param in SOAK_CASES else "folder")
    return layout, model, load_file(folder / f"{layout}-{model}.safetensors")


def test_import_and_export_change_no_bit(case: tuple[str, str, Found], start: Found) -> None:
    _, name, found = case
    assert torch.equal(found["imported"], start[f"{name}.weights"])


def test_the_ranks_compute_what_one_device_does(
    case: tuple[str, str, Found], alone: dict[str, Found], start: Found
) -> None:
    """Losses, norms and validation of all steps; the sum of all gradients, as the weights have moved by them."""
    layout, name, found = case
    torch.testing.assert_close(found["figures"], alone[name]["figures"], rtol=1e-5, atol=0)
    for what in ("stepped", "adam"):
        moved = alone[name][what] - start[f"{name}.weights"]
        assert (found[what] - alone[name][what]).norm() <= 1e-5 * moved.norm()
    assert found["alike"] == LAYOUTS[layout].size


def test_a_state_is_of_no_layout(case: tuple[str, str, Found], start: Found) -> None:
    _, name, found = case
    assert torch.equal(found["state"], start[f"{name}.state"])


@pytest.fixture
def narrow(request: pytest.FixtureRequest) -> tuple[str, Found]:
    """A layout, and what it has found with the narrow model."""
    kind = request.param
    folder = request.getfixturevalue("soak_folder" if (kind, NARROW) in SOAK_CASES else "folder")
    return kind, load_file(folder / f"{kind}-{NARROW}.safetensors")


IN_SOAK = [pytest.param(kind, marks=pytest.mark.soak) for kind, name in SOAK_CASES if name == NARROW]


@pytest.mark.parametrize("narrow", ["fsdp", *IN_SOAK], indirect=True)
def test_bf16_is_rounded_as_on_one_device(narrow: tuple[str, Found], start: Found) -> None:
    """FSDP casts a block before it gathers it, and adds its gradients in fp32. TP adds two products in the place of
    one, with a rounding of its own."""
    layout, found = narrow[0], narrow[1]["bf16"]
    most = {"fsdp": 0.1, "fsdp-tp": 2.0}[layout]
    flat = start[f"{NARROW}.weights"]
    exact, rounded = (torch.zeros_like(flat) for _ in range(2))
    for gradient in (exact, rounded):
        model = Decoder(MODELS[NARROW], flat)
        model.bind_gradients(gradient)
        with torch.autocast("cpu", torch.bfloat16, enabled=gradient is rounded):
            total, losses = model.losses(model.hidden(batch(0)[:, :-1]), batch(0)[:, 1:])
        (total / losses.numel()).backward()
    error = (rounded - exact).norm()
    assert 0.3 * error < (found - exact).norm() < 2 * error
    assert (found - rounded).norm() < most * error


@pytest.mark.parametrize("narrow", [*(kind for kind, name in CASES if name == NARROW), *IN_SOAK], indirect=True)
def test_all_ranks_leave_out_the_steps_that_overflow(narrow: tuple[str, Found], start: Found) -> None:
    """And have the same scale then, and no scale in the gradient."""
    layout, found = narrow
    overflows, of_all, steps_of_all = found["fp16 overflows"].tolist()
    size = LAYOUTS[layout].size
    assert overflows >= 2 and of_all == size * overflows and steps_of_all == size
    exact = torch.zeros_like(start[f"{NARROW}.weights"])
    model = Decoder(MODELS[NARROW], start[f"{NARROW}.weights"])
    model.bind_gradients(exact)
    next_token_loss(model(batch(0)[:, :-1]), batch(0)).backward()
    assert 1e-6 * exact.norm() < (found["fp16"] - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("layout", STAGE_LAYOUTS)
def test_ranks_that_share_a_stage_repeat_what_overflows_together(layout: str, folder: Path) -> None:
    found = load_file(folder / f"{layout}-stages.safetensors")
    for index in range(len(STAGES)):
        alone = StageScene(index, ONE, lambda what, shape: torch.zeros(shape), "fp16").overflow()
        overflows, of_all = found[f"{index} fp16 overflows"].tolist()
        assert overflows >= 2 and of_all == LAYOUTS[layout].size * overflows
        for what in ("taken", *(("a backward", "b backward") if index else ())):
            assert (found[f"{index} fp16 {what}"] - alone[what]).norm() < 1e-2 * alone[what].norm(), (index, what)


@pytest.mark.parametrize("layout", STAGE_LAYOUTS)
def test_ranks_that_share_a_stage_compute_what_one_device_does(layout: str, folder: Path) -> None:
    """Outputs, gradients of inputs and weights, a step, weights of two epochs, and a rebase."""
    found = load_file(folder / f"{layout}-stages.safetensors")
    for index in range(len(STAGES)):
        alone = StageScene(index, ONE, lambda what, shape: torch.zeros(shape))
        alone.play()
        for what, value in alone.found.items():
            several = found[f"{index} {what}"]
            assert (several - value).norm() <= 1e-5 * value.norm(), (index, what)
        assert torch.equal(found[f"{index} imported"], alone.found["imported"])
