"""The part of a round that all members compute alike, for `test_other_cpus.py` and its processes posing as other CPUs:

    python -m tests.optim.support.shared_half FOLDER    prints a hash of the next state for each method

FOLDER holds the state before (fp32) and each method's messages, as `write` left them.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Final

import torch

from optim import config
from optim.strategies.interface import OuterStrategy, RoundInfo
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig
from tests.optim.support.layouts import layout_of
from tests.optim.support.rounds import encoded

LAYOUT: Final = layout_of({"embed": torch.empty(256, 192), "gain": torch.empty(192), "w": torch.empty(96, 320)})
INNER: Final = InnerConfig(lr=1e-2, batch_size=4, total_steps=100)
ROUND_INFO: Final = RoundInfo(7, 6, 3.3e-3)
WEIGHTS: Final = (0.1, 0.2, 0.3, 0.4)
FP32: Final = config.CodecConfig(up="fp32", down="fp32")
RUNS: Final[dict[str, tuple[config.OuterConfig, config.CodecConfig]]] = {
    "diloco": (config.DilocoConfig(steps=5), config.CodecConfig()),
    "trimmed mean": (config.DilocoConfig(steps=5, merge="trimmed_mean"), config.CodecConfig(down="fp32")),
    "median": (config.DilocoConfig(steps=5, merge="median"), config.CodecConfig(up="fp32", down="fp32")),
    "flag": (config.DilocoConfig(steps=5, merge="flag"), config.CodecConfig(up="bf16", down="fp32")),
    "topk": (config.DilocoConfig(steps=5), config.CodecConfig(up="topk", down="nf4")),
    "low rank": (config.DilocoConfig(steps=5), config.CodecConfig(up="powersgd")),
    "allocated": (config.DilocoConfig(steps=5), config.CodecConfig(up="lgreco", down="bf16")),
    "demo": (config.DemoConfig(), config.CodecConfig()),
    "sparseloco": (config.SparseLocoConfig(steps=5), config.CodecConfig()),
    "votes": (config.LionConfig(), config.CodecConfig()),
    "mean of votes": (config.LionConfig(vote="average"), config.CodecConfig()),
    "adamw": (config.AllReduceConfig(batch=8), FP32),
    "lamb": (config.AllReduceConfig(batch=8, optimizer="lamb"), FP32),
}


def built(name: str) -> OuterStrategy:
    return build_strategy(*RUNS[name], LAYOUT, INNER)


def write(folder: Path) -> None:
    """Write everything that is random or a peer's own, in one process."""
    generator = torch.Generator().manual_seed(11)
    for number in range(3):
        state = torch.randn(LAYOUT.numel, generator=generator)
        (folder / f"state-{number}.bin").write_bytes((state.abs() if number == 2 else state).numpy().tobytes())
    for name in RUNS:
        for k in range(len(WEIGHTS)):
            strategy = built(name)
            coding = strategy.coding(ROUND_INFO, states(folder, strategy))
            product = torch.randn(LAYOUT.numel, generator=generator) * 10.0 ** torch.randint(-3, 1, (LAYOUT.numel,))
            for index, message in enumerate(encoded(strategy, ROUND_INFO, coding, product)[0]):
                (folder / f"{name}-{k}-{index}.bin").write_bytes(message.numpy().tobytes())


def states(folder: Path, strategy: OuterStrategy) -> list[torch.Tensor]:
    raw = [bytearray((folder / f"state-{i}.bin").read_bytes()) for i in range(1 + len(strategy.shared))]
    return [torch.frombuffer(data, dtype=torch.float32) for data in raw]


def next_state(name: str, folder: Path) -> str:
    strategy = built(name)
    before = states(folder, strategy)
    after, whole = [tensor.clone() for tensor in before], torch.zeros(LAYOUT.numel)
    coding = strategy.coding(ROUND_INFO, before)
    for index in range(coding.count):
        messages = [(folder / f"{name}-{k}-{index}.bin").read_bytes() for k in range(len(WEIGHTS))]
        result = coding.merge(index, messages, WEIGHTS)
        if strategy.elementwise:
            strategy.apply(ROUND_INFO, coding, index, result, after, before)
            continue
        for place, update in coding.updates(index, result):
            whole[place] = update
    if not strategy.elementwise:
        strategy.step_into(ROUND_INFO, after, before, whole)
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in after)).hexdigest()


if __name__ == "__main__":
    for run in RUNS:
        print(run, next_state(run, Path(sys.argv[1])), sep=": ")  # noqa: T201
