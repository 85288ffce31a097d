"""What is measured on one GPU, in one go: training in bf16 and fp16, models served in 8 and 4 bits, and `--compile`.

    python benchmarks/machine/gpu.py [--models 125M] [--sizes 100M] [--json [FILE]]

These run one after the other, each in a process of its own, as they do alone, and a part that fails stops none:

- `training/fp16.py`: the losses of peers in fp16, fp32 and bf16 in one run, and what overflows;
- `machine/steps.py`: the pace and memory of training steps in bf16, compiled, and in fp16;
- `serving/quantized.py`: a served model in fp32, bf16, int8 and nf4;
- a run of one peer, `peer join --device cuda`, without and with `--compile`: the pace of its worker, which is confined.

The JSON has the figures of all. Exits with 1 if a part fails, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import ROOT, add_json, write_results
from benchmarks.machine.footprint import LOOPBACK, RUN, start

MODEL: Final = {"width": 512, "layers": 8, "inter": 1408}
ROUNDS, STEPS = 4, 50
WARM: Final = STEPS
"""Inner steps that compile, or wait for the first buffers."""
DEADLINE_S: Final = 900.0
EVERY_S: Final = 0.2
Figures = dict[str, Any]


def parts(models: str, sizes: list[str], rounds: int, seeds: int) -> dict[str, list[str]]:
    """Return the script of each part, with its options."""
    losses = ["--device", "cuda", "--rounds", str(rounds), "--seeds", str(seeds)]
    return {
        "losses in fp16": ["training/fp16.py", *losses],
        "training steps": ["machine/steps.py", "--models", models, "--compile", "--fp16"],
        "served in 8 and 4 bits": ["serving/quantized.py", "--device", "cuda", "--sizes", *sizes],
    }


def figures_of(script: list[str], folder: Path) -> Figures:
    """Run a benchmark of this repository; return its figures, or how it failed."""
    file = folder / "figures.json"
    file.unlink(missing_ok=True)
    name, *options = script
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *options, "--json", str(file)], check=False
    )
    found: Figures = json.loads(file.read_text())["figures"] if file.exists() else {}
    return found | ({"failed": ended.returncode} if ended.returncode else {})


def confined(folder: Path, compiles: bool, device: str = "cuda") -> Figures:
    """Train a run of one peer; return what its worker says of itself, and its pace."""
    folder.mkdir()
    file, home, invite = folder / "run.toml", folder / "peer", folder / "coordinator" / "invite"
    run = RUN.replace("\nsteps = 1\n", f"\nsteps = {STEPS}\n").replace('dtype = "fp32"', 'dtype = "auto"')
    file.write_text(run.format(peers=1, rounds=ROUNDS, **MODEL))
    deadline = time.monotonic() + DEADLINE_S
    with ExitStack() as stack:
        start(stack, folder, "coordinate", str(file), "--home", str(invite.parent), *LOOPBACK)
        while not invite.exists():
            if time.monotonic() > deadline:
                return {"failed": "the coordinator printed no invite"}
            time.sleep(EVERY_S)
        options = ("--device", device, *(("--compile",) if compiles else ()), *LOOPBACK)
        peer = start(stack, folder, "join", str(invite), "--home", str(home), *options)
        try:
            code = peer.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"failed": f"the run took longer than {DEADLINE_S:.0f} s"}
        if code:
            (log,) = folder.glob("join-*.log")
            return {"failed": code, "said": log.read_text(errors="replace")[-2000:]}
    return paced(home / "events.jsonl")


def paced(log: Path) -> Figures:
    """Return what the events of a peer say of its worker."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    ready, guarded = ([e for e in events if e["event"] == name] for name in ("worker_ready", "worker_confined"))
    steps = [e["tokens_per_s"] for e in events if e["event"] == "inner_step"]
    if not ready or len(steps) <= WARM:
        return {"failed": f"the peer reported {len(steps)} inner steps"}
    return {
        "device": ready[-1]["device"],
        "compiled": ready[-1]["compiled"],
        "starts": len(ready),
        "confined": {name: said for name, said in guarded[-1].items() if name not in ("event", "pid", "at")}
        if guarded
        else None,
        "tokens_s": round(statistics.median(steps[WARM:])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="125M", help="of the training steps, as in machine/steps.py")
    parser.add_argument("--sizes", nargs="+", choices=["10M", "100M", "1B"], default=["100M"], help="of served models")
    parser.add_argument("--rounds", type=int, default=20, help="of the losses in fp16")
    parser.add_argument("--seeds", type=int, default=1, help="of the losses in fp16")
    add_json(parser, "machine/gpu")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this machine has no CUDA GPU that torch can use: run it on one that has", file=sys.stderr)
        return 2
    found: dict[str, Figures] = {"card": {"name": torch.cuda.get_device_name()}}
    with tempfile.TemporaryDirectory() as place:
        for name, script in parts(options.models, options.sizes, options.rounds, options.seeds).items():
            print(f"\n{name}", flush=True)
            found[name] = figures_of(script, Path(place))
        for name, compiles in (("confined worker", False), ("confined worker, compiled", True)):
            found[name] = confined(Path(place) / name.replace(", ", "-").replace(" ", "-"), compiles)
            print(f"\n{name}\n{found[name]}", flush=True)
            if options.json:
                write_results(options.json, found)
    failed = [name for name, figures in found.items() if "failed" in figures]
    print(f"\n{'failed: ' + ', '.join(failed) if failed else 'all parts were measured'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
