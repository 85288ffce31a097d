"""The way of nanoGPT's prepare.py, for `build.py`: `datasets` tokenizes in processes, and a memory map takes the ids.

python rival.py FOLDER TOKENIZER OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core

import importlib

import numpy as np
from tokenizers import Tokenizer


def main(folder: str, tokenizer: str, out: str) -> None:
    datasets: Any = importlib.import_module("datasets")  # in the environment of this benchmark alone
    library = Tokenizer.from_file(tokenizer)
    end = library.token_to_id("<|endoftext|>")

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        ids = [*library.encode(row["text"], add_special_tokens=False).ids, end]
        return {"ids": ids, "len": len(ids)}

    cache = str(Path(out).parent / "cache")
    parts = [
        datasets.Dataset.from_json([str(path) for path in sorted(Path(folder).glob("*.jsonl"))], cache_dir=cache),
        datasets.Dataset.from_parquet([str(path) for path in sorted(Path(folder).glob("*.parquet"))], cache_dir=cache),
    ]
    whole = datasets.concatenate_datasets(parts).shuffle(seed=1)
    done = whole.map(tokenized, remove_columns=["text"], num_proc=len(os.sched_getaffinity(0)))
    ids = np.memmap(out, dtype=np.uint16, mode="w+", shape=(sum(done["len"]),))
    at, shards = 0, min(1024, len(done))
    for number in range(shards):
        batch = done.shard(num_shards=shards, index=number, contiguous=True).with_format("numpy")
        joined = np.concatenate(batch["ids"])
        ids[at : at + len(joined)] = joined
        at += len(joined)
    ids.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
