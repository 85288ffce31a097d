"""Child of test_layouts: forks four ranks, which train models in layouts, as `CASES` names them.

layout_ranks.py FOLDER      reads start.safetensors there, writes LAYOUT-MODEL.safetensors and LAYOUT-stages.safetensors
layout_ranks.py FOLDER soak the same for `SOAK_CASES`, without stages
"""

from __future__ import annotations

import gc
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Final

import torch
import torch._dynamo  # what cuts a model imports it at its first step, in each rank
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from peer.compute.device import resolve_device
from peer.compute.optimizer import InnerSpec
from peer.compute.rank_optimizer import RankOptimizer
from peer.compute.rank_trainer import RankTrainer
from peer.config import InnerConfig, ModelConfig
from peer.footprint.layout import Layout
from peer.footprint.step_size import StepSize
from peer.model.decoder import FlatLayout
from peer.parallel import cut_model  # noqa: F401  imported once, by the process that the ranks are forked from
from peer.parallel.rank_model import RankModel
from peer.parallel.ranks import Ranks, open_ranks
from tests.peer.parallel.stage_scene import LAYOUTS as STAGE_LAYOUTS
from tests.peer.parallel.stage_scene import STAGES, StageScene

_TIED: Final = ModelConfig(
    vocab_size=32, hidden_size=16, layers=2, heads=4, kv_heads=2, intermediate_size=24, max_seq_len=16
)
_UNTIED: Final = replace(_TIED, tie_embeddings=False)
MODELS: Final = {
    # 5, 17 and 13 rows to cut in two; of 5 cut in four, the last rank has none
    "llama": replace(_UNTIED, hidden_size=5, head_dim=4, vocab_size=34, intermediate_size=26),
    "qwen2": replace(_UNTIED, attention_bias=True),
    "qwen3": replace(_TIED, qk_norm=True, head_dim=6),
    "shared": replace(_TIED, shared_blocks=2, attention_bias=True, output_bias=True),
}
LAYOUTS: Final = {
    "ddp": Layout(replicate=2),
    "fsdp": Layout(shard=2),
    "tp": Layout(tensor=2),
    "fsdp-tp": Layout(shard=2, tensor=2),
    "fsdp-of-four": Layout(shard=4),
    "ddp-fsdp": Layout(shard=2, replicate=2),
    "ddp-tp": Layout(tensor=2, replicate=2),
}
CASES: Final = [
    *((kind, name) for kind in ("ddp", "fsdp", "tp") for name in ("llama", "qwen2", "qwen3")),
    ("fsdp-tp", "qwen2"),
    ("fsdp-tp", "shared"),
    ("fsdp-of-four", "llama"),
    ("ddp-fsdp", "qwen3"),
    ("ddp-tp", "qwen2"),
]
SOAK_CASES: Final = [("fsdp-tp", "llama"), ("fsdp-tp", "qwen3")]
"""What these models add to others is cut along each axis alone in `CASES`."""
FIRST: Final = {"fsdp": 2}
"""The first of the processes that make up a group, where it is not 0: two pairs are at work at one time."""
NARROW: Final = "llama"
"""The model that is tried in bf16 and fp16, too."""
START_POWER: Final = 17
"""Of two, the scale of the loss that fp16 begins with."""
FP16: Final = InnerConfig(lr=1e-2, batch_size=5, total_steps=100, dtype="fp16", clip_norm=1e9)
SPEC: Final = InnerSpec("adamw", lr=1e-2, decay="matrices")
STEPS: Final = 2
RATE: Final = 0.1
PROCESSES: Final = 4


def batch(step: int) -> torch.Tensor:
    """Five rows, which no layout deals out evenly; the last batch has not even one for each rank."""
    rows = 1 if step == STEPS - 1 else 5
    return torch.randint(0, 32, (rows, 9), generator=torch.Generator().manual_seed(step))


def shared(file: Path, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Map a file that all ranks write."""
    return torch.from_file(str(file), shared=True, size=numel, dtype=dtype)


def backward(model: RankModel, tokens: torch.Tensor, rows_at_once: int | None = None) -> tuple[float, float]:
    """Leave the gradient in the model; return the mean loss and the gradient's norm, the same at all ranks."""
    (loss,) = model.ranks.sum((model.add_up(tokens, rows_at_once),))
    return loss, model.sum_gradients()


def train(ranks: Ranks, name: str, folder: Path, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the ranks have exported and found, each flat vector as one."""
    config = MODELS[name]
    layout = FlatLayout.of(config)
    flat, state = start[f"{name}.weights"], start[f"{name}.state"]
    model = RankModel(config, ranks, narrow=None)
    found: dict[str, torch.Tensor] = {}

    def keep(what: str, out: torch.Tensor) -> None:
        ranks.sum((0.0,))  # all have written
        found[what] = out.clone()

    def export(what: str) -> torch.Tensor:
        out = shared(folder / f"{what}.bin", layout.numel).fill_(torch.nan)
        ranks.sum((0.0,))  # all have cleared it
        model.pieces.write(model.weights, out)
        keep(what, out)
        return out

    model.import_from(flat)
    export("imported")
    figures = []
    for step in range(STEPS):
        (validation,) = ranks.sum((model.share_of_loss(batch(step)),))
        figures.append((*backward(model, batch(step), rows_at_once=2), validation))
        model.weights.sub_(model.gradient, alpha=RATE)
    stepped = export("stepped")
    kept = model.weights.clone()
    model.import_from(stepped)
    alike = float(torch.equal(model.weights, kept))  # the copies that were not exported have the same bits
    found["alike"] = torch.tensor(ranks.sum((alike,)))

    optimizer = RankOptimizer(SPEC, layout, model.pieces, ranks, model.weights)
    optimizer.load(state)
    saved = shared(folder / "state.bin", len(state), torch.uint8).fill_(255)
    ranks.sum((0.0,))
    optimizer.save(saved)
    keep("state", saved)
    model.import_from(flat)
    backward(model, batch(0))
    optimizer.optimizer.step(model.weights, model.gradient)
    export("adam")
    found["figures"] = torch.tensor(figures, dtype=torch.float64)

    if name == NARROW and ranks.layout.shard > 1:  # which casts in its own way
        narrow = RankModel(config, ranks, narrow=torch.bfloat16)
        narrow.import_from(flat)
        backward(narrow, batch(0))
        model.weights.copy_(narrow.gradient)
        export("bf16")
    if name == NARROW:
        trainer = overflowed(ranks, flat)
        model.weights.copy_(trainer.gradient)
        export("fp16")
        overflows = START_POWER - math.log2(trainer.scale)
        found["fp16 overflows"] = torch.tensor([overflows, *ranks.sum((overflows, trainer.optimizer.steps))])
    return found


def overflowed(ranks: Ranks, flat: torch.Tensor) -> RankTrainer:
    """Return a trainer in fp16 after the first step that has not overflowed, of a scale with which many do."""
    trainer = RankTrainer(MODELS[NARROW], FP16, resolve_device("cpu"), ranks, StepSize(2))
    trainer.import_from(flat)
    assert trainer.scaler is not None
    trainer.scaler.scale = 2.0**START_POWER
    for _ in range(START_POWER):
        kept, outcome = trainer.local.clone(), trainer.step(batch(0), 5)
        if outcome.is_useful:
            break
        assert outcome.overflowed and not outcome.skipped and torch.equal(trainer.local, kept)
    assert not torch.equal(trainer.local, kept)
    return trainer


def compute_stages(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    """Return what the ranks have written and found of each stage of a pipeline."""
    found: dict[str, torch.Tensor] = {}
    for index in range(len(STAGES)):

        def place(what: str, shape: tuple[int, ...], index: int = index) -> torch.Tensor:
            return shared(folder / f"stage {index} {what}.bin", math.prod(shape)).view(shape)

        scene = StageScene(index, ranks, place)
        scene.play()
        found |= {f"{index} {what}": value for what, value in scene.found.items()}

        def place_narrow(what: str, shape: tuple[int, ...], index: int = index) -> torch.Tensor:
            return place(f"fp16 {what}", shape)

        narrow = StageScene(index, ranks, place_narrow, "fp16")
        found |= {f"{index} fp16 {what}": value for what, value in narrow.overflow().items()}
    ranks.sum((0.0,))  # all have written
    return found


def run_process(index: int, folder: Path, soak: bool) -> None:
    """Be a rank of each layout that has one for this process."""
    cases = SOAK_CASES if soak else CASES
    start = load_file(folder / "start.safetensors")
    for kind, layout in LAYOUTS.items():
        rank = index - FIRST.get(kind, 0)
        names = [name for of, name in cases if of == kind]
        if rank not in range(layout.size) or not names:
            continue
        place = folder / kind
        place.mkdir(exist_ok=True)
        with open_ranks(layout, rank, torch.device("cpu"), place / "store") as ranks:
            for name in names:
                found = train(ranks, name, place, start)
                if rank == 0:
                    save_file(found, folder / f"{kind}-{name}.safetensors")
            if kind in STAGE_LAYOUTS and not soak:
                found = compute_stages(ranks, place)
                if rank == 0:
                    save_file(found, folder / f"{kind}-stages.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    gc.freeze()
    children = []
    for index in range(PROCESSES):
        if pid := os.fork():
            children.append(pid)
            continue
        code = 1
        try:
            run_process(index, folder, "soak" in sys.argv[2:])
            code = 0
        except BaseException:  # noqa: BLE001  as the interpreter does with what a program lets through
            traceback.print_exc()
        finally:
            os._exit(code)
    sys.exit(max([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children], key=abs))


if __name__ == "__main__":
    main()
