"""Merge rules: what an owner computes, and how far attackers move the result.

    python benchmarks/arithmetic/merging.py [--values 25000000] [--repeat 3] [--codec int8] [--json [FILE]]

CPU seconds are of one process with one torch thread, for all slices of n messages, the least of several. The error
is that of the merged update against the honest peers' common direction, |merged - g| / |g|, in fp32 over 20,000 values,
the mean of three draws. Honest updates are g plus noise of their own; `cosine` is how much two of them agree. The
attacker's norm is at most 1.45 of an honest one, so that no gate stops it. With so few values chance adds about 0.01 to
each cosine; a real slice has a hundred times as many.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results

CONTRIBUTORS = (4, 8, 16)
GROUPS = ((4, 1, 0.07), (4, 1, 0.5), (8, 2, 0.07), (8, 2, 0.5))
"""(contributors, attackers, cosine of two honest updates)"""
ATTACKS = ("none", "sign flip", "few values", "own direction", "copies", "against the mean", "a little off", "zero")
VALUES, DRAWS, LENGTH = 20_000, 3, 1.45
Figures = dict[str, Any]


def rules() -> dict[str, Any]:
    from optim.config import DilocoConfig
    from optim.rules.registry import build_rule

    return {name: build_rule(DilocoConfig(steps=1, merge=name)) for name in ("mean", "trimmed_mean", "median", "flag")}


def measure_time(values: int, repeat: int, codec_name: str) -> list[Figures]:
    import torch

    from optim.codecs import get_codec
    from optim.strategies.dense import DenseCoding

    codec, generator, found = get_codec(codec_name), torch.Generator().manual_seed(0), []
    plain = DenseCoding([slice(0, values)], codec, codec)
    messages = [
        [codec.encode(torch.randn(plain.size(i), generator=generator)) for i in range(plain.count)]
        for _ in range(max(CONTRIBUTORS))
    ]
    for n in CONTRIBUTORS:
        row: Figures = {"contributors": n}
        for name, rule in rules().items():
            coding, least = DenseCoding([slice(0, values)], codec, codec, rule), math.inf
            for _ in range(repeat):
                begin = time.process_time()
                for i in range(coding.count):
                    coding.merge(i, [message[i] for message in messages[:n]], [1 / n] * n)
                least = min(least, time.process_time() - begin)
            row[name] = round(least, 3)
        found.append(row)
    return found


def updates(generator: Any, n: int, attackers: int, cosine: float, attack: str) -> tuple[Any, Any]:
    """Return all updates (n, c) and the honest direction (c,)."""
    import torch

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, VALUES, generator=generator) / VALUES**0.5

    g = noise()
    g /= g.norm()
    x = g + math.sqrt(1 / cosine - 1) * noise(n)
    honest, length, copy = x[attackers:], LENGTH / math.sqrt(cosine), noise()
    mean, spread = honest.mean(0), honest.std(0)
    for i in range(attackers):
        few = torch.zeros(VALUES)
        few[: VALUES // 100] = -g[: VALUES // 100].sign()
        lie = {
            "none": x[i], "sign flip": -x[i], "few values": few, "own direction": noise(), "copies": copy,
            "against the mean": -mean, "a little off": mean - spread, "zero": torch.zeros(VALUES),
        }[attack]  # fmt: skip
        stretched = attack not in ("none", "a little off", "zero")
        x[i] = lie * (length / lie.norm()) if stretched else lie
    return x, g


def measure_errors() -> list[Figures]:
    import torch

    from optim.codecs import get_codec

    fp32, generator, found = get_codec("fp32"), torch.Generator().manual_seed(1), []
    for n, attackers, cosine in GROUPS:
        for attack in ATTACKS:
            row: Figures = {"contributors": n, "attackers": attackers, "cosine": cosine, "attack": attack}
            draws = [updates(generator, n, attackers, cosine, attack) for _ in range(DRAWS)]
            for name, rule in rules().items():
                error = 0.0
                for x, g in draws:
                    weights = rule.weights([1] * n, [float(v.norm()) for v in x])
                    taken = [(fp32.encode(v.contiguous()), w) for v, w in zip(x, weights, strict=True) if w > 0]
                    merged = rule.merge(fp32, [e for e, _ in taken], [w for _, w in taken], VALUES, fp32)
                    error += float((fp32.decode(merged, VALUES) - g).norm() / g.norm()) / DRAWS
                row[name] = round(error, 3)
            found.append(row)
    return found


def show(rows: list[Figures]) -> None:
    print(*rows[0], sep="\t")
    for row in rows:
        print(*row.values(), sep="\t")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=25_000_000, help="length of the update (default 25,000,000)")
    parser.add_argument("--repeat", type=int, default=3, help="times each is measured; the least counts")
    parser.add_argument("--codec", default="int8", help="codec of the messages whose merge is timed (default int8)")
    add_json(parser, "merging")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    report = {"values": options.values, "seconds": measure_time(options.values, options.repeat, options.codec)}
    report["errors"] = measure_errors()
    show(report["seconds"])
    show(report["errors"])
    if options.json:
        write_results(options.json, report)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
