"""An adapter beside a base that ranks have in parts, against one process that has it whole."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from safetensors.torch import load_file, save_file

from optim.config import CodecConfig, DilocoConfig
from optim.wire_sizes import exchange_of
from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.config import StorageConfig
from peer.footprint.device import device_items
from peer.footprint.layout import Layout
from peer.footprint.parameters import base_of
from peer.footprint.workload import Workload
from peer.model.layout import FlatLayout, init_flat
from tests.peer.parallel.base_ranks import CASES, LAYOUTS, MODELS, NARROW, batches, inner_of, samples_of
from tests.support.forking.forked import ForkedProcess

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]
Found = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def start() -> dict[str, Found]:
    """The base of each case by name, and the adapter's flat vector."""
    found: dict[str, Found] = {}
    for seed, (name, model) in enumerate(MODELS.items()):
        base = base_of(model)
        views = FlatLayout.of(base).views(init_flat(base, seed))
        kind = torch.bfloat16 if name in NARROW else torch.float32
        found[name] = {key: view.to(kind) for key, view in views.items()} | {"adapter": init_flat(model, seed)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start: dict[str, Found]) -> Path:
    """What all ranks have found."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, tensors in start.items():
        save_file(tensors, folder / f"{name}.safetensors")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ("tests.peer.parallel.base_ranks", str(folder))
    with ForkedProcess(*command, stderr=PIPE, env=environment, cwd=ROOT, text=True) as parent:
        _, said = parent.communicate(timeout=300)
    assert parent.returncode == 0, said
    return folder


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[Found]]:
    kind, name = request.param
    return name, [load_file(folder / f"{kind}-{name}-{rank}.safetensors") for rank in range(LAYOUTS[kind].size)]


def alone(name: str, start: Found) -> tuple[list[float], list[float], torch.Tensor]:
    """Return the losses of the steps, the validations and the adapter of one process."""
    model = MODELS[name]
    trainer = InnerTrainer(model, inner_of(name), resolve_device("cpu"), base={**start})
    if name == "marked":
        trainer.take_marks()
    trainer.import_from(start["adapter"])
    tokens = [*batches(name, model.vocab_size)]
    validations = [trainer.evaluate(tokens[:2], lambda: None)]
    losses = [trainer.step(each, step, samples_of(each, step)).loss for step, each in enumerate(tokens)]
    with trainer.holding(start["adapter"]):
        validations.append(trainer.evaluate(tokens[:2], lambda: None))
    return losses, validations, trainer.local


def test_the_ranks_train_as_one_process_does(case: tuple[str, list[Found]], start: dict[str, Found]) -> None:
    name, found = case
    losses, validations, adapter = alone(name, start[name])
    assert losses[-2] < losses[0] - 0.01
    for rank in found:
        assert rank["losses"].tolist() == pytest.approx(losses, abs=1e-4)
        assert rank["validations"].tolist() == pytest.approx(validations, abs=1e-4)
        assert torch.equal(rank["adapter"], found[0]["adapter"])
        moved = adapter - start[name]["adapter"]
        assert (rank["adapter"] - adapter).norm() < 1e-2 * moved.norm()


def test_the_ranks_export_each_value_of_the_adapter_once(case: tuple[str, list[Found]]) -> None:
    _, found = case
    deltas = torch.stack([rank["delta"] for rank in found])
    assert bool(((~deltas.isnan()).sum(0) == 1).all())
    assert torch.equal(deltas.nansum(0), -found[0]["adapter"])


def test_each_rank_holds_its_part_of_the_base(case: tuple[str, list[Found]], start: dict[str, Found]) -> None:
    """Half of it between two steps, also after a validation; in a step the ends and two of three blocks are whole."""
    name, found = case
    base = {key: value for key, value in start[name].items() if key != "adapter"}
    sizes = {  # of vectors, which are fp32 in any base
        key: value.numel() * (4 if value.dim() == 1 else value.element_size()) for key, value in base.items()
    }
    whole = sum(sizes.values())
    ends = sum(size for key, size in sizes.items() if ".layers." not in key)
    blocks = MODELS[name].layers // MODELS[name].shared_blocks
    model = MODELS[name]
    work = Workload(
        model=model,
        inner=inner_of(name),
        exchange=exchange_of(DilocoConfig(steps=10), CodecConfig(), FlatLayout.of(model).shapes, peers=4),
        blocks=range(model.layers),
        seq_len=20,
        sequences=2,
        layout=Layout(shard=2),
        base=StorageConfig(dtype="bf16" if name in NARROW else "fp32"),
    )
    between = found[0]["bytes"][:3] + found[1]["bytes"][:3]  # the two of one copy
    assert between.tolist() == [whole] * 3
    for rank in found:
        rest, _, _, peak = rank["bytes"].tolist()
        assert rest < 0.54 * whole
        most = ends + (whole - ends) * min(1.0, (2 + (blocks - 2) * 0.54) / blocks)
        assert rest < peak <= most
        items = device_items(work)
        assert items["base"] == pytest.approx(rest, rel=0.05)
        assert items["base"] + items["gathered base"] > 0.95 * peak
        assert items["weights"] == items["gradient"] == 4 * len(rank["adapter"])
