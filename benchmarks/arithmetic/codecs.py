"""Every codec on one core, beside bitsandbytes, hivemind's codecs (in another process) and a plain copy.

    python benchmarks/arithmetic/codecs.py [--values 16777216] [--repeat 15] [--json [FILE]]

Prints GB/s of fp32 in (encode) and out (decode), bits per value and the relative error on a heavy-tailed vector. A time
is the least of several, in CPU seconds of a process with one torch thread, so that other jobs on the machine disturb
little. They still take memory bandwidth: compare the figures with the plain copy's.

Exits with 1 if a codec misses its bar: int8 encodes 3 GB/s and decodes 2, int4 half of that, any other 0.4.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results

BARS = {"int8": (3.0, 2.0), "int4": (1.5, 1.0), "two_bit": (3.0, 2.0)}  # GB/s of fp32: encode, decode
BAR_OTHERS = (0.4, 0.4)
HIVEMIND = {"FLOAT16": 16, "UNIFORM_8BIT": 8, "BLOCKWISE_8BIT": 8, "QUANTILE_8BIT": 8}
Figures = dict[str, Any]


def heavy_tailed(numel: int) -> Any:
    """Return normal values times a magnitude that varies by row, as in pseudo-gradients: fp32, (numel,)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(numel // 4096 + 1, generator=generator).exp_().repeat_interleave(4096)[:numel]
    return torch.randn(numel, generator=generator).mul_(spread).mul_(1e-3)


def least_cpu_s(work: Callable[[], Any], repeat: int) -> float:
    work()
    least = math.inf
    for _ in range(repeat):
        begin = time.process_time()
        work()
        least = min(least, time.process_time() - begin)
    return least


def figures(x: Any, coded_bytes: int, decoded: Any, encode_s: float, decode_s: float) -> Figures:
    gigabytes = 4 * x.numel() / 1e9
    return {
        "encode_gb_s": round(gigabytes / encode_s, 3),
        "decode_gb_s": round(gigabytes / decode_s, 3),
        "bits_per_value": 8 * coded_bytes / x.numel(),
        "relative_error": float((decoded - x).norm() / x.norm()),
    }


def measure_ours(x: Any, repeat: int) -> dict[str, Figures]:
    import torch

    from optim.codecs import CODECS

    found = {}
    decoded = torch.empty_like(x)
    for name, codec in CODECS.items():
        data = codec.encode(x)
        encode_s = least_cpu_s(lambda codec=codec, data=data: codec.encode(x, data), repeat)
        decode_s = least_cpu_s(lambda codec=codec, data=data: codec.decode(data, x.numel(), decoded), repeat)
        bars = BARS.get(name, BAR_OTHERS)
        found[name] = figures(x, data.numel(), decoded, encode_s, decode_s) | {
            "stated_bits_per_value": codec.bits_per_value,
            "unbiased": codec.unbiased,
            "needs_error_feedback": codec.needs_error_feedback,
            "meets_bar": 4 * x.numel() / 1e9 / encode_s >= bars[0] and 4 * x.numel() / 1e9 / decode_s >= bars[1],
        }
    return found


def measure_low_rank(numel: int, repeat: int) -> dict[str, Figures]:
    """Measure PowerSGD on a matrix of 4096 columns, error feedback included."""
    import torch

    from optim.codecs import get_codec
    from optim.strategies.low_rank import LowRankFormat
    from peer.model.layout import FlatLayout, TensorSlot

    found = {}
    rows, columns = numel // 4096, 4096
    x = heavy_tailed(rows * columns)
    layout = FlatLayout({"matrix": TensorSlot(0, (rows, columns), rows * columns)}, rows * columns)
    for rank in (4, 16):
        wire = LowRankFormat(layout, [["matrix"]], rank, get_codec("fp32"))
        coding = wire.coding(0, x)
        out = [torch.empty(coding.message_bytes(i), dtype=torch.uint8) for i in range(coding.count)]
        encode_s = least_cpu_s(lambda wire=wire, c=coding, out=out: wire.encode(c, x, out), repeat)

        def decode(coding: Any = coding, out: Any = out) -> Any:
            decoded = torch.empty_like(x)
            for i, message in enumerate(out):
                for _, place, values in coding.decoded(coding.up, i, message):  # of one block
                    decoded[place] = values
            return decoded

        LowRankFormat(layout, [["matrix"]], rank, get_codec("fp32")).encode(
            coding, x, out
        )  # the error is a first one's
        decode_s = least_cpu_s(decode, repeat)
        size = sum(len(message) for message in out)
        found[f"powersgd rank {rank}"] = figures(x, size, decode(), encode_s, decode_s) | {
            "stated_bits_per_value": 8 * size / x.numel(),
            "unbiased": False,
            "needs_error_feedback": True,
            "meets_bar": 4 * x.numel() / 1e9 / max(encode_s, decode_s) >= BAR_OTHERS[0],
        }
    return found


def measure_copy(x: Any, repeat: int) -> Figures:
    import torch

    target = torch.empty_like(x)
    copy_s = least_cpu_s(lambda: target.copy_(x), repeat)
    return figures(x, 4 * x.numel(), target, copy_s, copy_s)


def measure_bitsandbytes(x: Any, repeat: int) -> dict[str, Figures] | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing GPU
        try:
            from bitsandbytes import functional
        except ImportError as error:
            return f"not installed: {error}"
        eight = lambda: functional.quantize_blockwise(x, blocksize=4096)  # noqa: E731
        four = lambda: functional.quantize_4bit(x, blocksize=64, quant_type="nf4")  # noqa: E731
        found = {}
        for name, encode, decode in (
            ("blockwise 8-bit", eight, functional.dequantize_blockwise),
            ("nf4", four, functional.dequantize_4bit),
        ):
            data, state = encode()
            size = data.numel() + 4 * state.absmax.numel()
            decoded = decode(data, state).flatten()
            encode_s = least_cpu_s(encode, max(2, repeat // 4))
            decode_s = least_cpu_s(lambda d=decode, a=data, s=state: d(a, s), max(2, repeat // 4))
            found[name] = figures(x, size, decoded, encode_s, decode_s)
        return found


def measure_hivemind(numel: int, repeat: int) -> dict[str, Figures]:
    """Measure hivemind's codecs, in a child process: hivemind and libp2p cannot share one."""
    import torch
    from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
    from hivemind.proto.runtime_pb2 import CompressionType

    torch.set_num_threads(1)
    x = heavy_tailed(numel)
    found = {}
    for name in HIVEMIND:
        kind = CompressionType.Value(name)
        message = serialize_torch_tensor(x, kind)
        decoded = deserialize_torch_tensor(message)
        tries = max(2, repeat // 4)
        encode_s = least_cpu_s(lambda kind=kind: serialize_torch_tensor(x, kind), tries)
        decode_s = least_cpu_s(lambda message=message: deserialize_torch_tensor(message), tries)
        found[name] = figures(x, len(message.buffer), decoded, encode_s, decode_s)
    return found


def hivemind_in_its_process(numel: int, repeat: int) -> dict[str, Figures] | str:
    command = [sys.executable, __file__, "--values", str(numel), "--repeat", str(repeat), "--hivemind-child"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if child.returncode:
        return "not available: " + (child.stderr.strip().splitlines() or ["the process ended"])[-1]
    return dict(json.loads(child.stdout.strip().splitlines()[-1]))


def show(title: str, group: dict[str, Figures] | str) -> None:
    if isinstance(group, str):
        print(f"{title:<28}{group}")
        return
    for name, row in group.items():
        bar = {True: "", False: "  MISSES ITS BAR"}[row.get("meets_bar", True)]
        print(
            f"{title + ' ' + name:<28}{row['encode_gb_s']:>9.2f}{row['decode_gb_s']:>9.2f}"
            f"{row['bits_per_value']:>9.3f}{row['relative_error']:>10.5f}{bar}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 24, help="length of the vector (default 16,777,216)")
    parser.add_argument("--repeat", type=int, default=15, help="times each is measured; the least counts")
    add_json(parser, "codecs")
    parser.add_argument("--hivemind-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hivemind_child:
        print(json.dumps(measure_hivemind(options.values, options.repeat)))
        return 0
    import torch

    torch.set_num_threads(1)
    x = heavy_tailed(options.values)
    report = {
        "values": options.values,
        "memcpy": {"fp32": measure_copy(x, options.repeat)},
        "barnraise": measure_ours(x, options.repeat) | measure_low_rank(options.values, options.repeat),
        "bitsandbytes": measure_bitsandbytes(x, options.repeat),
        "hivemind": hivemind_in_its_process(options.values, options.repeat),
    }
    print(f"{'one core, GB/s of fp32':<28}{'encode':>9}{'decode':>9}{'bits':>9}{'error':>10}")
    for title in ("memcpy", "barnraise", "bitsandbytes", "hivemind"):
        show(title, report[title])
    if options.json:
        write_results(options.json, report)
    return 0 if all(row["meets_bar"] for row in report["barnraise"].values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
