"""Child of test_cut_base: forks four ranks, which train an adapter beside a base that is cut, as `CASES` say.

base_ranks.py FOLDER      reads NAME.safetensors there, writes LAYOUT-NAME-RANK.safetensors
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo  # what cuts a model imports it at its first step, in each rank
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from peer.compute.device import resolve_device
from peer.compute.rank_trainer import RankTrainer
from peer.config import TARGETS, AdapterConfig, InnerConfig, ModelConfig
from peer.footprint.layout import Layout
from peer.footprint.step_size import StepSize
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout
from peer.parallel import cut_base  # noqa: F401  imported once, by the process that the ranks are forked from
from peer.parallel.ranks import Ranks, open_ranks

LAYOUTS: Final = {"fsdp": Layout(shard=2), "ddp-fsdp": Layout(shard=2, replicate=2)}
PROCESSES: Final = 4
STEPS: Final = 8
_TIED: Final = ModelConfig(
    vocab_size=96, hidden_size=48, layers=3, heads=4, kv_heads=2, intermediate_size=80, max_seq_len=32
)
_UNTIED: Final = replace(_TIED, tie_embeddings=False)
_SOME: Final = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
_ALL: Final = replace(_SOME, targets=TARGETS)
MODELS: Final = {
    "bf16": replace(_TIED, adapter=_ALL),
    "fp32": replace(_UNTIED, attention_bias=True, adapter=_SOME),
    "odd": replace(_UNTIED, hidden_size=35, head_dim=4, vocab_size=97, intermediate_size=53, adapter=_ALL),
    "shared": replace(_TIED, layers=4, shared_blocks=2, adapter=_ALL),
    "normed": replace(_TIED, qk_norm=True, adapter=_ALL),
    "marked": replace(_TIED, adapter=_ALL),
    "recomputed": replace(_TIED, adapter=_ALL),
    "dropped": replace(_TIED, adapter=replace(_ALL, dropout=0.2)),
    "muon": replace(_TIED, adapter=_ALL),
}
"""By the name of a case. Bases of "bf16" and "recomputed" are in bf16, the others in fp32."""
NARROW: Final = ("bf16", "recomputed")


CASES: Final = [*(("fsdp", name) for name in MODELS), ("ddp-fsdp", "bf16")]


def inner_of(name: str) -> InnerConfig:
    """Return the settings of the steps."""
    inner = InnerConfig(lr=5e-3, batch_size=5, total_steps=STEPS, warmup_steps=0, schedule="constant", dtype="fp32")
    return replace(inner, optimizer="muon") if name == "muon" else inner


def batches(name: str, vocabulary: int) -> Iterator[torch.Tensor]:
    """Yield five rows a step, which no layout deals out evenly; of the last step one, so that a rank has none."""
    draw = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        rows = [torch.randint(0, vocabulary, (1 if step == STEPS - 1 else 5,), generator=draw)]
        for _ in range(20):
            rows.append((3 * rows[-1] + 1) % vocabulary)
        tokens = torch.stack(rows, dim=1)
        counts = torch.rand(tokens.shape, generator=draw) < 0.4
        yield torch.where(counts, tokens, -1 - tokens) if name == "marked" else tokens


def samples_of(tokens: torch.Tensor, step: int) -> range:
    """Return the numbers of the samples of a batch."""
    return range(10 * step, 10 * step + len(tokens))


def held_bytes(decoder: Decoder) -> int:
    """Return the bytes of frozen weights that this process holds now, gathered ones as a whole."""
    held = [each for each in decoder.parameters() if not each.requires_grad]
    return sum(_local(each).numel() * each.element_size() for each in held)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def peak_of(decoder: Decoder) -> Iterator[list[int]]:
    """Note what is held when a block begins to compute, forward, and when it is through backward."""
    peak = [held_bytes(decoder)]

    def note(*of: Any) -> None:
        peak[0] = max(peak[0], held_bytes(decoder))

    found = [block.register_forward_hook(note) for block in decoder.layers.values()]
    found += [block.get_submodule("mlp").register_full_backward_hook(note) for block in decoder.layers.values()]
    yield peak
    for hook in found:
        hook.remove()


def train(name: str, ranks: Ranks, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the losses of the steps and what this rank has exported, with a validation before and after."""
    model = MODELS[name]
    size = StepSize(2, "full") if name == "recomputed" else StepSize(2)
    base = {key: value for key, value in start.items() if key != "adapter"}
    trainer = RankTrainer(model, inner_of(name), resolve_device("cpu"), ranks, size, base)
    if name == "marked":
        trainer.take_marks()
    trainer.import_from(start["adapter"])
    decoder = trainer._model._loss.decoder
    rest = held_bytes(decoder)
    tokens = [*batches(name, model.vocab_size)]
    validations, losses = [trainer.evaluate(tokens[:2], lambda: None)], list[float]()
    after_validation = held_bytes(decoder)
    with peak_of(decoder) as peak:
        losses = [trainer.step(each, step, samples_of(each, step)).loss for step, each in enumerate(tokens)]
    with trainer.holding(start["adapter"]):
        validations.append(trainer.evaluate(tokens[:2], lambda: None))
    numel = FlatLayout.of(model).numel
    zeros, delta = torch.zeros(numel), torch.full((numel,), torch.nan)
    trainer.write_delta(zeros, slice(0, numel), delta)
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "validations": torch.tensor(validations, dtype=torch.float64),
        "adapter": trainer.local.clone(),
        "delta": delta,  # NaN where the other rank exports
        "bytes": torch.tensor([rest, after_validation, held_bytes(decoder), peak[0]]),
    }


def run_rank(rank: int, folder: Path) -> None:
    """Be a rank of each layout that has one of that number."""
    for kind, layout in LAYOUTS.items():
        if rank >= layout.size:
            continue
        with open_ranks(layout, rank, torch.device("cpu"), folder / f"{kind}.store") as ranks:
            for name in (name for of, name in CASES if of == kind):
                found = train(name, ranks, load_file(folder / f"{name}.safetensors"))
                save_file(found, folder / f"{kind}-{name}-{rank}.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()
    children = []
    for rank in range(PROCESSES):
        if pid := os.fork():
            children.append(pid)
            continue
        code = 1
        try:
            run_rank(rank, Path(sys.argv[1]))
            code = 0
        except BaseException:  # noqa: BLE001  as the interpreter does with what a program lets through
            traceback.print_exc()
        finally:
            os._exit(code)
    sys.exit(max([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children], key=abs))


if __name__ == "__main__":
    main()
