"""`peer data build` of seeded text: seconds of both passes, MB/s, peak memory and the root, beside what is possible.

    python benchmarks/data_build/build.py [--gb 0.3] [--tokenizer FILE] [--rival PYTHON] [--folder DIR] [--json [FILE]]

The text is lines of the Python standard library in documents of about 3 kB, half of it in parquet files and half in
JSON lines. The tokenizer is a byte-level BPE of 32,768 ids that is learned from the standard library. The limit is
`encode_batch_fast` of the tokenizers library alone: on the first documents, in memory, with the same threads.

With `--rival` a Python that has `datasets`, `tokenizers` and `numpy` tokenizes the same files as nanoGPT's prepare.py
does: `map` in as many processes as there are cores, then one memory map.

Memory is sampled every 50 ms: the resident memory of the command and its worker together, with the pages of files that
both have mapped; and without these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.markdown import table
from benchmarks.common.options import ROOT, add_json, write_results
from peer.data.pages.folder import BuiltPages

EVERY_S: Final = 0.05
FILE_BYTES: Final = 64 << 20
DOCUMENT_LINES: Final = 80
LIMIT_BYTES: Final = 100_000_000
BATCH_CHARACTERS: Final = 2 << 20
VOCABULARY: Final = 1 << 15
COLUMNS = ["", "MB", "s", "pass 1", "pass 2", "MB/s", "RSS, MB", "without mapped files, MB"]
RIVAL: Final = Path(__file__).with_name("rival.py")
LIBRARY: Final = Path(sysconfig.get_paths()["stdlib"])
Row = dict[str, Any]


def library_files() -> list[Path]:
    return sorted(path for path in LIBRARY.rglob("*.py") if "site-packages" not in path.parts)


def documents(size_bytes: int, seed: int = 1) -> Iterator[str]:
    """Yield texts of random runs of lines, until they have that many bytes."""
    lines = "".join(path.read_text(errors="replace") for path in library_files()).splitlines(keepends=True)
    rng = np.random.default_rng(seed)
    done = 0
    while done < size_bytes:
        starts = rng.integers(0, len(lines), 1024)
        counts = rng.geometric(1 / DOCUMENT_LINES, 1024)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            text = "".join(lines[start : start + count])
            done += len(text)
            yield text


def write_texts(folder: Path, size_bytes: int) -> int:
    """Write the files, every second one as parquet; return the bytes of all texts."""
    folder.mkdir()
    batch, size, number, total = list[str](), 0, 0, 0
    for text in documents(size_bytes):
        batch.append(text)
        size += len(text)
        total += len(text.encode())
        if size >= min(FILE_BYTES, size_bytes // 2):
            write_file(folder, number, batch)
            batch, size, number = [], 0, number + 1
    if batch:
        write_file(folder, number, batch)
    return total


def write_file(folder: Path, number: int, texts: list[str]) -> None:
    if number % 2:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / f"{number:04}.parquet")
        return
    with (folder / f"{number:04}.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def learn_tokenizer(path: Path) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train([str(file) for file in library_files()[:400]], trainer)
    made.save(str(path))


def watched(command: list[str], is_second: Path) -> Row:
    """Run a command; return its seconds, those before a file appears, and its peaks of memory."""
    began = time.monotonic()
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    first_s, rss, own = 0.0, 0, 0
    while process.poll() is None:
        if not first_s and is_second.exists():
            first_s = time.monotonic() - began
        with suppress(psutil.Error):
            infos = [each.memory_info() for each in (process, *process.children(recursive=True))]
            rss = max(rss, sum(info.rss for info in infos))
            own = max(own, sum(info.rss - info.shared for info in infos))
        time.sleep(EVERY_S)
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}: see above")
    return {"seconds": time.monotonic() - began, "first_s": first_s, "rss_bytes": rss, "own_bytes": own}


def limit(tokenizer: Path, size_bytes: int) -> Row:
    """Return the rate of the library alone."""
    library, texts = Tokenizer.from_file(str(tokenizer)), [*documents(min(LIMIT_BYTES, size_bytes))]
    batches, size = [list[str]()], 0
    for text in texts:
        batches[-1].append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            batches.append([])
            size = 0
    began = time.monotonic()
    for batch in batches:
        library.encode_batch_fast(batch, add_special_tokens=False)
    took_s = time.monotonic() - began
    return {"seconds": took_s, "bytes": sum(len(text.encode()) for text in texts)}


def measure(folder: Path, gb: float, tokenizer: Path | None, rival: str) -> list[Row]:
    texts, out = folder / "texts", folder / "out"
    size_bytes = write_texts(texts, int(gb * 1e9))
    if tokenizer is None:
        learn_tokenizer(tokenizer := folder / "tokenizer.json")
    command = [str(Path(sys.executable).with_name("peer")), "data", "build", str(texts), "--tokenizer", str(tokenizer)]
    built = watched([*command, "--seq-len", "1024", "--out", str(out)], out / ".build" / "note")
    index = BuiltPages.open(out).index
    tokens = (index.train.windows + index.held_out.windows) * (index.seq_len + 1)
    rows: list[Row] = [{"what": "peer data build", "bytes": size_bytes, "tokens": tokens, **built}]
    rows[0]["root"] = index.config.root
    rows.append({"what": "encode_batch_fast alone", **limit(tokenizer, size_bytes)})
    if rival:
        command = [rival, str(RIVAL), str(texts), str(tokenizer), str(folder / "rival.bin")]
        rows.append({"what": "datasets and a memory map", "bytes": size_bytes, **watched(command, folder / "none")})
    return rows


def cells(row: Row) -> list[str]:
    """Return a row of the table of `COLUMNS`."""
    first_s, rss = row.get("first_s", 0.0), row.get("rss_bytes", 0)
    passes = [f"{first_s:.1f}", f"{row['seconds'] - first_s:.1f}"] if first_s else ["", ""]
    memory = [f"{rss / 1e6:.0f}", f"{row['own_bytes'] / 1e6:.0f}"] if rss else ["", ""]
    rate = f"{row['bytes'] / row['seconds'] / 1e6:.2f}"
    return [row["what"], f"{row['bytes'] / 1e6:.0f}", f"{row['seconds']:.1f}", *passes, rate, *memory]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.3, help="of text (default: 0.3)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--rival", default="", metavar="PYTHON", help="a Python that has datasets and tokenizers")
    parser.add_argument("--folder", type=Path, help="where the text and the data set go (default: a temporary folder)")
    add_json(parser, "training/data_build")
    options = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(Path(folder), options.gb, options.tokenizer, options.rival)
    shown = [cells(row) for row in rows]
    print(table(COLUMNS, shown))
    print(f"root {rows[0]['root']}, {rows[0]['tokens']:,} tokens")
    if options.json:
        write_results(options.json, {"columns": COLUMNS, "rows": shown, "root": rows[0]["root"]})


if __name__ == "__main__":
    main()
