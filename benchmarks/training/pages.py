"""The cost of a data set of pages to peers that fetch it: their memory, and how long their workers wait for pages.

    python benchmarks/training/pages.py [--sizes 0.05 20] [--cache 1] [--peers 3] [--rounds 8] [--json [FILE]]

Real processes on 127.0.0.1: a coordinator that has the data set and peers that have nothing train a tiny model on it.
The pages are sparse: each has its number at its head and zeros behind, so that no two are equal and 20 GB take no disk.
The same number of rounds is run for each of `--sizes` (GB). The peak of resident memory is that of the kernel (VmHWM),
of the network process and the worker; it is not to grow with the data set. `idle` is the time that workers waited for
pages (event `samples_awaited`), after each peer's first round, as a share of the time to the last one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import trio
from blake3 import blake3

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.markdown import table
from benchmarks.common.options import add_json, write_results
from peer.data.pages.index import PAGE_BYTES_MAX, PageIndex, PagePart, encode_index
from tests.support.peer_process import PeerProcess
from tests.swarm.support.swarm_harness import WITNESS, open_swarm

SEQ_LEN = 4095  # 512 windows a page
A_PAGE = PAGE_BYTES_MAX // (2 * (SEQ_LEN + 1))
VOCABULARY = 256
COLUMNS = ["GB", "pages", "network process, MB", "worker, MB", "pages kept", "idle", "first wait, s", "missing"]
PAGES_A_FILE = (256 << 20) // PAGE_BYTES_MAX


def write_sparse(folder: Path, pages: int) -> PageIndex:
    """Write a data set of that many pages to train on, and one held out."""
    folder.mkdir()
    parts = {}
    for name, first, count in (("train", 0, pages), ("held-out", pages, 1)):
        hashes = bytearray()
        for at in range(count):
            path = folder / f"{name}-{at // PAGES_A_FILE:05}.pages"
            head = np.array([int(digit) for digit in f"{first + at:08}"], "<u2").tobytes()
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.seek(at % PAGES_A_FILE * PAGE_BYTES_MAX)
                file.write(head)
                file.truncate((at % PAGES_A_FILE + 1) * PAGE_BYTES_MAX)
            hashes += blake3(head + bytes(PAGE_BYTES_MAX - len(head))).digest()
        parts[name] = PagePart(
            windows=count * A_PAGE, documents=count, text_bytes=count * PAGE_BYTES_MAX, hashes=bytes(hashes)
        )
    index = PageIndex(
        seq_len=SEQ_LEN,
        vocab_size=VOCABULARY,
        dtype="uint16",
        tokenizer="bytes",
        validation_share=0.05,
        train=parts["train"],
        held_out=parts["held-out"],
    )
    (folder / "index.msgpack").write_bytes(encode_index(index))
    return index


def run_toml() -> str:
    """Return the rules: a model so small that reading and fetching weigh most."""
    return (
        WITNESS.replace('"folder"', '"pages"')
        .replace("seq_len = 64", f"seq_len = {SEQ_LEN}")
        .replace("max_seq_len = 128", f"max_seq_len = {SEQ_LEN}")
        .replace("hidden_size = 32", "hidden_size = 16")
        .replace("intermediate_size = 64", "intermediate_size = 16")
        .replace("layers = 2", "layers = 1")
        .replace("heads = 2", "heads = 1")
    )


def peaks_of(peer: PeerProcess) -> Iterator[int]:
    """Yield the peak of resident memory in bytes, of the network process and then of its children."""
    pids = [peer.process.pid]
    for pid in pids:
        status = Path(f"/proc/{pid}/status")
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
        yield int(line.split()[1]) * 1024


async def measure(size_gb: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run the peers on a data set of that size."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        index = write_sparse(data, max(1, round(size_gb * 1e9 / PAGE_BYTES_MAX)))
        outer = f"[outer]\nsteps = {options.steps}"
        async with open_swarm(Path(folder), run=run_toml(), outer=outer, min_peers=options.peers, data=data) as swarm:
            peers = [swarm.join(f"p{number}", "--data-cache", str(options.cache)) for number in range(options.peers)]
            await swarm.committed(options.rounds, *peers, timeout_s=1500)
            peaks = [list(peaks_of(peer)) for peer in peers]
            return {
                "gb": round(index.size_bytes / 1e9, 2),
                "pages": index.pages,
                "network_mb": round(max(peak[0] for peak in peaks) / 1e6),
                "worker_mb": round(max(max(peak[1:], default=0) for peak in peaks) / 1e6),
                "pages_kept": max(kept_by(peer) for peer in peers),
                "idle": round(mean(idle_share(peer) for peer in peers), 5),
                "first_wait_s": round(mean(first_wait(peer) for peer in peers), 2),
                "missing": sum(len(peer.all("page_missing")) for peer in peers),
            }


def kept_by(peer: PeerProcess) -> int:
    """Return how many pages a peer has kept at most."""
    return max((int(fact.fields["pages"]) for fact in peer.all("pages_kept")), default=0)


def first_wait(peer: PeerProcess) -> float:
    """Return the seconds that the worker waited before the peer's first commit."""
    first = peer.commits[0].at
    return sum(float(fact.fields["seconds"]) for fact in peer.all("samples_awaited") if fact.at <= first)


def idle_share(peer: PeerProcess) -> float:
    """Return the share of the time from the first commit to the last in which the worker waited for pages."""
    first, last = peer.commits[0].at, peer.commits[-1].at
    waited = sum(float(fact.fields["seconds"]) for fact in peer.all("samples_awaited") if fact.at > first)
    return waited / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.05, 20.0], help="of the data set, GB")
    parser.add_argument("--cache", type=float, default=1.0, help="of each peer, GB")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="inner steps of a round, of 4 sequences each")
    add_json(parser, "training/pages")
    options = parser.parse_args()
    rows = [trio.run(measure, size, options) for size in options.sizes]
    shown = [[str(value) for value in row.values()] for row in rows]
    print(table(COLUMNS, shown))
    if options.json:
        write_results(options.json, {"columns": COLUMNS, "rows": shown})


if __name__ == "__main__":
    main()
