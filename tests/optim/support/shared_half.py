"""What all members must compute alike, run by `test_other_cpus.py` in processes that pretend to be other CPUs:

    python -m tests.optim.shared_half FOLDER    prints a hash of the next state for each method

FOLDER holds the state before (theta.bin and others, fp32) and each method's messages, as `write` left them.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Final

import torch

from optim import config
from optim.simulate import layout_of
from optim.strategies.interface import OuterStrategy, Turn
from optim.strategies.registry import build_recipe
from peer.config import InnerConfig
from tests.optim.support.rounds import encoded

LAYOUT: Final = layout_of({"embed": torch.empty(256, 192), "gain": torch.empty(192), "w": torch.empty(96, 320)})
INNER: Final = InnerConfig(lr=1e-2, batch_size=4, total_steps=100)
TURN: Final = Turn(7, 6, 3.3e-3)
WEIGHTS: Final = (0.1, 0.2, 0.3, 0.4)
FP32: Final = config.CodecConfig(up="fp32", down="fp32")
RUNS: Final[dict[str, tuple[config.OuterConfig, config.CodecConfig]]] = {
    "diloco": (config.Diloco(steps=5), config.CodecConfig()),
    "topk": (config.Diloco(steps=5), config.CodecConfig(up="topk", down="nf4")),
    "low rank": (config.Diloco(steps=5), config.CodecConfig(up="powersgd")),
    "allocated": (config.Diloco(steps=5), config.CodecConfig(up="lgreco", down="bf16")),
    "demo": (config.Demo(), config.CodecConfig()),
    "sparseloco": (config.SparseLoco(steps=5), config.CodecConfig()),
    "votes": (config.Lion(), config.CodecConfig()),
    "mean of votes": (config.Lion(vote="average"), config.CodecConfig()),
    "adamw": (config.AllReduce(batch=8), FP32),
    "lamb": (config.AllReduce(batch=8, optimizer="lamb"), FP32),
}


def built(name: str) -> OuterStrategy:
    return build_recipe(*RUNS[name], LAYOUT, INNER)


def write(folder: Path) -> None:
    """One process makes everything that is random or a peer's own."""
    generator = torch.Generator().manual_seed(11)
    for number in range(3):
        state = torch.randn(LAYOUT.numel, generator=generator)
        (folder / f"state-{number}.bin").write_bytes((state.abs() if number == 2 else state).numpy().tobytes())
    for name in RUNS:
        for k in range(len(WEIGHTS)):
            recipe = built(name)
            coding = recipe.coding(TURN, states(folder, recipe))
            product = torch.randn(LAYOUT.numel, generator=generator) * 10.0 ** torch.randint(-3, 1, (LAYOUT.numel,))
            for index, message in enumerate(encoded(recipe, TURN, coding, product)[0]):
                (folder / f"{name}-{k}-{index}.bin").write_bytes(message.numpy().tobytes())


def states(folder: Path, recipe: OuterStrategy) -> list[torch.Tensor]:
    raw = [bytearray((folder / f"state-{i}.bin").read_bytes()) for i in range(1 + len(recipe.shared))]
    return [torch.frombuffer(data, dtype=torch.float32) for data in raw]


def next_state(name: str, folder: Path) -> str:
    recipe = built(name)
    before = states(folder, recipe)
    after, whole = [tensor.clone() for tensor in before], torch.zeros(LAYOUT.numel)
    coding = recipe.coding(TURN, before)
    for index in range(coding.count):
        messages = [(folder / f"{name}-{k}-{index}.bin").read_bytes() for k in range(len(WEIGHTS))]
        for place, update in coding.updates(index, coding.merge(index, messages, WEIGHTS)):
            whole[place] = update
            if recipe.elementwise:
                recipe.step_into(TURN, [t[place] for t in after], [t[place] for t in before], update)
    if not recipe.elementwise:
        recipe.step_into(TURN, after, before, whole)
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in after)).hexdigest()


if __name__ == "__main__":
    for run in RUNS:
        print(run, next_state(run, Path(sys.argv[1])), sep=": ")  # noqa: T201
