"""Prints what common machines train and serve, by the arithmetic of `peer plan` and `peer serve`.

`python -m tools.what_fits --write` updates the table in README.md.

A machine trains the largest of some published models that fits, whole or in stages with other such machines, with
sequences of 1,024 tokens, DiLoCo, int8 and, on a GPU, 8-bit moments. It serves with the share of its memory that
`peer serve` takes by default, a GPU's where there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from optim.config import CodecConfig, DilocoConfig
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.footprint.cards import CARDS
from swarm.parts.weights import EvenWeights
from swarm.placement.costs import RunShape, cut
from swarm.placement.machine_plan import Machine, has_room
from swarm.run.sections import PipelineConfig
from swarm.serving.memory import FREE_SHARE, GPU_SHARE, blocks_that_fit

PAGE: Final = Path(__file__).resolve().parents[1] / "README.md"
HEAD: Final = "| your machine | trains a whole | in stages, with others like it | serves of Llama 3.1 8B |"
MARKED: Final = re.compile(rf"{re.escape(HEAD)}\n(?:\|.*\n)*")
SEQ_LEN: Final = 1024
STAGES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
PEERS: Final = 16
LINK_BITS_S: Final = 1e8
CPU_FLOPS: Final = 2e11
"""Of the pace, which the table does not show."""


@dataclass(frozen=True)
class Named:
    """A machine of the table: its card, if it has one, and its memory in GB."""

    title: str
    card: str | None
    memory_gb: int


MACHINES: Final = (
    Named("16 GB, no GPU", None, 16),
    Named("32 GB, no GPU", None, 32),
    Named("RTX 3060, 32 GB", "rtx3060", 32),
    Named("RTX 4090, 64 GB", "rtx4090", 64),
)


def _llama(vocabulary: int, width: int, layers: int, heads: int, kv_heads: int, inter: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=inter,
        max_seq_len=2048,
        tie_embeddings=tied,
    )


MODELS: Final = {
    "SmolLM2 135M": _llama(49152, 576, 30, 9, 3, 1536, True),
    "SmolLM2 360M": _llama(49152, 960, 32, 15, 5, 2560, True),
    "Llama 3.2 1B": _llama(128256, 2048, 16, 32, 8, 8192, True),
    "SmolLM2 1.7B": _llama(49152, 2048, 24, 32, 32, 8192, True),
    "Llama 3.2 3B": _llama(128256, 3072, 28, 24, 8, 8192, True),
    "Llama 3.1 8B": _llama(128256, 4096, 32, 32, 8, 14336, False),
}
"""By size; the shapes of their config.json."""
SERVED: Final = "Llama 3.1 8B"


def table() -> str:
    """Return the table in Markdown."""
    return "\n".join([HEAD, "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows()), ""])


def updated(page: str) -> str:
    """Return the page with a true table."""
    return MARKED.sub(table(), page)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield a row of the table for each machine."""
    for named in MACHINES:
        card = None if named.card is None else CARDS[named.card]
        memory = named.memory_gb * 1e9
        if card is None:
            machine = Machine("cpu", 0.0, memory, CPU_FLOPS, LINK_BITS_S, narrow=False)
        else:
            machine = Machine("cuda", card.memory_bytes, memory, card.flops, LINK_BITS_S, narrow=True)
        fits = {name: stages for name in MODELS if (stages := _stages_needed(machine, name))}
        whole = [name for name, stages in fits.items() if stages == 1]
        parted = [f"{name} in {stages}" for name, stages in fits.items() if stages > 1]
        model, room = MODELS[SERVED], FREE_SHARE * memory if card is None else GPU_SHARE * card.memory_bytes
        plain, small = (blocks_that_fit(EvenWeights(model, "bf16", kind), room) for kind in (None, "nf4"))
        in_nf4 = "all" if small >= model.layers else str(small)
        served = f"{plain} of {model.layers} blocks, {in_nf4} in nf4" if plain < model.layers else "all blocks"
        yield named.title, whole[-1] if whole else "-", parted[-1] if parted else "-", served


def _stages_needed(machine: Machine, name: str) -> int:
    """Return the smallest number of stages whose every part fits; 0 if none does."""
    inner = InnerConfig(lr=1e-3, batch_size=8, total_steps=1)
    if machine.device == "cuda":
        inner = replace(inner, optimizer="adamw8bit")
    for stages in (count for count in STAGES if count <= MODELS[name].layers):
        model, pipeline = MODELS[name], PipelineConfig()
        if stages > 1:
            model = replace(model, tie_embeddings=False)
            pipeline = PipelineConfig(stages=stages, micro_batch=1, recompute=True)
        cuts = cut(stages, model, SEQ_LEN)
        outer, data = DilocoConfig(steps=100), DataConfig(seq_len=SEQ_LEN)
        if has_room(RunShape(model, data, inner, outer, CodecConfig(), pipeline, cuts), machine, PEERS):
            return stages
    return 0


def main() -> None:
    """Print the table, or write it to README.md."""
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(updated(PAGE.read_text()))
    else:
        sys.stdout.write(table())


if __name__ == "__main__":
    main()
