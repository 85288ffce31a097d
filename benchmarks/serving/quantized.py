"""A served model in fp32, bf16, int8 and nf4: bytes, tokens a second and logits.

    python benchmarks/serving/quantized.py [--sizes 10M 100M 1B] [--device cuda] [--json [FILE]]

Each form is a process of one thread. It founds a served model of a random Llama, loads it as a server does, and
generates. "bytes" is what a server of the whole model fetches: its weights, and so the physical limit of its memory.
"worker" is what the block worker of a real `peer serve` of one thread holds behind an answer, by /proc/PID/status:
`RssAnon`, which is the weights (the worker copies them out of their files), keys and values, and the heap of torch; and
behind the + `RssFile`, which is libraries. On a GPU "device" is what torch holds there for the weights.
int8 and nf4 stand beside `transformers` with bitsandbytes' own linear layers, in turn with the engine. The
limit reads the stored blocks and the head once, at the rate of memory measured with one thread. "from fp32" and "from
them" (`transformers`) are distances of the logits behind a prompt, relative to their norm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, cast

import torch
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.serving.local_engine import in_turn, our_step, prompt_of, their_step
from benchmarks.serving.served_model import GREEDY, ServedModel, generate, write_model
from cli.demo.child_processes import children
from peer.config import HiddenType, Quantization
from peer.events import EventLog
from peer.footprint.stored import stored_tensors
from peer.identity import Identity
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.ipc.span import Span
from peer.model.parameter_files import ParameterFiles
from peer.model.quantize import STORED_TYPES
from swarm.parts.weights import part_bytes
from swarm.serving.create_model import create_model, prepare_model
from tests.peer.inference.quantized_reference import quantized_copy

FORMS: Final[dict[str, tuple[HiddenType, Quantization | None]]] = {
    "fp32": ("fp32", None),
    "bf16": ("bf16", None),
    "int8": ("bf16", "int8"),
    "nf4": ("bf16", "nf4"),
    "int8 on fp32": ("fp32", "int8"),
    "nf4 on fp32": ("fp32", "nf4"),
}
BATCHES: Final = (1, 4)
COLUMNS: Final = [
    "model", "form", "bytes", "memory of the worker: its own + of files", "logits from fp32", "from `transformers`",
    *(f"tokens/s, batch {batch}: ours / `transformers` (of the limit)" for batch in BATCHES),
]  # fmt: skip
CONTEXT: Final = 128
_ANSWER: Final = 16
_SLICES: Final = 5
_STEPS: Final = 3
_SWEEP_FLOATS: Final = 32 << 20


@torch.inference_mode()
def measure(size: str, form: str, device: str) -> dict[str, Any]:
    """Measure one form of a model in this process."""
    torch.set_num_threads(1)
    dtype, quantization = FORMS[form]
    with tempfile.TemporaryDirectory() as place:
        folder, home = Path(place) / "checkpoint", Path(place) / "home"
        home.mkdir()
        reference = write_model(folder, size)
        prepared = prepare_model(folder, "m", True, dtype, None, quantization)
        trio.run(create_model, home, prepared, Identity.generate(), EventLog())
        span = Span.whole(prepared.model.layers)
        files = ParameterFiles([folder if quantization is None else home / "weights"])
        stored = {t.name: t for t in stored_tensors(prepared.model, span.blocks, dtype, quantization)}

        def source(name: str) -> torch.Tensor:
            return files.tensor(name).to(STORED_TYPES[stored[name].type], copy=True)

        blocks = SpanBlocks(prepared.model, span, source, torch.device(device), quantization=quantization)
        held = torch.cuda.memory_allocated() if device == "cuda" else None
        options = ("--device", device, "--dtype", dtype, *(("--quantize", quantization) if quantization else ()))
        worker = worker_bytes(Path(place), span, options)
    theirs = reference if quantization is None else quantized_copy(reference, quantization)
    theirs = theirs.to(STORED_TYPES["BF16" if dtype == "bf16" else "F32"]).to(device)
    engine, rows = Engine(blocks, pages=4000), []
    read = part_bytes(prepared, span) - stored["model.embed_tokens.weight"].size_bytes
    data = torch.ones(_SWEEP_FLOATS, device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    for batch in BATCHES:
        ours, rival = in_turn(
            [our_step(engine, batch, CONTEXT), their_step(theirs, batch, CONTEXT)], _SLICES, _STEPS, clock
        )
        [sweep] = in_turn([lambda: data.sum().item()], 5, 1, clock)
        limit = read / (4 * _SWEEP_FLOATS / sweep)
        rows.append(
            {"batch": batch, "tokens_s": round(batch / ours, 1), "rival_s": round(batch / rival, 1)}
            | {"of_limit": round(limit / ours, 3)}
        )
        for id in range(batch):
            engine.close(id)
    return {
        "form": form,
        "fetched_bytes": part_bytes(prepared, span),
        "worker_bytes": worker,
        "device_bytes": held,
        "logits": _logits(engine),
        "theirs": theirs(torch.tensor([prompt_of(1, 300)], device=device)).logits[0, -1].float().tolist(),
        "rows": rows,
    }


def worker_bytes(folder: Path, span: Span, options: tuple[str, ...]) -> dict[str, int]:
    """Serve folder/checkpoint; return the memory of the worker behind an answer, by kind."""

    async def answer(served: ServedModel) -> None:
        async with served.client() as model:
            await generate(model.session(GREEDY), prompt_of(1, CONTEXT), _ANSWER)

    with children() as group:
        served = ServedModel(folder, group, options)
        served.serve("server", f"{span.first}:{span.end}")
        trio.run(answer, served)
        return served.worker_bytes("server")


def _logits(engine: Engine) -> list[float]:
    engine.keeps_logits = True
    engine.open(0, GREEDY)
    engine.submit(0, 0, prompt_of(1, 300), None, samples=True)
    said = [output for _ in range(4) for output in engine.step() if output.logits is not None][-1]
    assert said.logits is not None
    return cast("list[float]", said.logits.float().cpu().tolist())


def _away(ours: list[float], theirs: list[float]) -> float:
    a, b = torch.tensor(ours), torch.tensor(theirs)
    return float((a - b).norm() / b.norm())


def compare(size: str, device: str) -> list[dict[str, Any]]:
    """Measure all forms, each in a process of its own."""
    found: dict[str, dict[str, Any]] = {}
    for form in FORMS:
        command = [sys.executable, __file__, "--form", size, form, "--device", device]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, stderr=subprocess.DEVNULL)
        found[form] = json.loads(ended.stdout)
        print(f"{form} is measured", file=sys.stderr, flush=True)
    plain = found["fp32"]["logits"]
    for row in found.values():
        ours, theirs = row.pop("logits"), row.pop("theirs")
        row |= {"size": size, "from_fp32": _away(ours, plain), "from_theirs": _away(ours, theirs)}
    return list(found.values())


def _told(row: dict[str, Any]) -> list[str]:
    """Return a row of RESULTS.md."""
    size = f"{row['fetched_bytes'] / 1e6:.1f} MB"
    apart = [f"{row[name]:.1e}" if row[name] else "0" for name in ("from_fp32", "from_theirs")]
    speeds = [f"{each['tokens_s']} / {each['rival_s']} ({each['of_limit']:.0%})" for each in row["rows"]]
    return [row["size"], row["form"], size, _memory(row), *apart, *speeds]


def _memory(row: dict[str, Any]) -> str:
    own, files = (row["worker_bytes"][kind] / 1e6 for kind in ("RssAnon", "RssFile"))
    on_device = "" if row["device_bytes"] is None else f", device {row['device_bytes'] / 1e6:.1f} MB"
    return f"{own:.0f} + {files:.0f} MB{on_device}"


def show(found: list[dict[str, Any]]) -> None:
    """Print the table."""
    batches = "".join(f"{f'batch {batch}':>16}" for batch in BATCHES)
    print("Tokens a second of one thread, and of `transformers` (int8 and nf4: with bitsandbytes' linear layers).")
    print(f"{'':<14}{'bytes':>9}{'worker':>18}{'from fp32':>11}{'from them':>10}{batches}   of the limit")
    for row in found:
        speeds = "".join(f"{r['tokens_s']:>9.1f} /{r['rival_s']:>5.1f}" for r in row["rows"])
        shares = " ".join(f"{r['of_limit']:.2f}" for r in row["rows"])
        size = f"{row['fetched_bytes'] / 1e6:.1f} MB"
        apart = f"{row['from_fp32']:11.4f}{row['from_theirs']:10.4f}"
        print(f"{row['form']:<14}{size:>9}{_memory(row):>18}{apart}{speeds}   {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=["10M", "100M", "1B"], default=["100M"])
    parser.add_argument("--form", nargs=2, metavar=("SIZE", "FORM"), help="measure one form, and print it as JSON")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    add_json(parser, "serving/quantized")
    options = parser.parse_args()
    if options.form:
        print(json.dumps(measure(options.form[0], options.form[1], options.device)))
        return
    found = []
    for size in options.sizes:
        print(f"{size} parameters")
        rows = compare(size, options.device)
        show(rows)
        found += rows
    if options.json:
        write_results(options.json, {"columns": COLUMNS, "rows": [_told(row) for row in found], "measured": found})


if __name__ == "__main__":
    main()
