"""Merge rules: what an owner computes.

    python benchmarks/arithmetic/merging.py [--values 25000000] [--repeat 3] [--codec int8] [--json [FILE]]

CPU seconds are of one process with one torch thread, for all slices of n messages, the least of several. What liars do
to a model under each rule is measured by `benchmarks/training/convergence.py --group liars`.
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
    show(report["seconds"])
    if options.json:
        write_results(options.json, report)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
