"""Tokens a second of answers that follow a JSON schema, beside answers of any text, at a vocabulary of 128k.

    python benchmarks/serving/masks.py [--sizes 10M 100M] [--tokens 96] [--rounds 5] [--json [FILE]]

One server, then two, of one thread each on 127.0.0.1 hold a random fp32 Llama with 128,256 words and a made tokenizer
of as many; one client. Free and masked answers come in turn, so that what else the machine does falls on both; the
ratio is that of the medians. A masked answer is a list of objects with an integer, a string and a Boolean. "mask" is
the median time that the client waits for one, with its grammar's process; "bytes" what it takes on the wire, of 16,032.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import trio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.serving.inference import parts
from benchmarks.serving.served_model import GREEDY, MODELS, generate, served_model
from peer.data.tokenizer import _stand_in
from peer.ipc.grammar_messages import Grammar
from swarm.inference.client import ModelClient
from swarm.inference.masks import KeptMasks

WORDS: Final = 128_256
WARM_UP: Final = 8
SCHEMA: Final = (
    '{"type":"array","minItems":500,"items":{"type":"object","additionalProperties":false,"required":["id","name","ok"],'
    '"properties":{"id":{"type":"integer"},"name":{"type":"string","maxLength":24},"ok":{"type":"boolean"}}}}'
)
_LETTERS: Final = 'etaoinshrdlucmfwypvbgkjqxz ETAOIN0123456789.,"{}[]:-_'


def made_tokenizer() -> Tokenizer:
    """Return a byte-level BPE whose merges are made by chance."""
    chance = random.Random(1)
    vocabulary = {_stand_in(byte): byte for byte in range(256)}
    letters, words, merges = [_stand_in(ord(letter)) for letter in _LETTERS], list(vocabulary), list[tuple[str, str]]()
    while len(vocabulary) < WORDS:
        left, right = chance.choice(words if chance.random() < 0.5 else letters), chance.choice(letters)
        if left + right not in vocabulary and len(left) < 10:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
            words.append(left + right)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def write_checkpoint(folder: Path, size: str) -> None:
    """Write the model and its tokenizer."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **MODELS[size],
        vocab_size=WORDS,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    made_tokenizer().save(str(folder / "tokenizer.json"))


async def rate(model: ModelClient, grammar: Grammar | None, count: int, tokens: int) -> tuple[float, list[int]]:
    """Return the tokens a second of so many answers at once, from the `WARM_UP`th token of each on, and the first
    answer."""
    said: dict[int, tuple[list[int], list[float]]] = {}

    async def one(number: int) -> None:
        session = model.session(GREEDY, grammar=grammar)
        prompt = [(31 * number + 7 * place + time.perf_counter_ns()) % WORDS for place in range(32)]
        said[number] = await generate(session, prompt, tokens)
        session.close()

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    seconds = [(times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP) for _, times in said.values()]
    assert all(len(found) == tokens for found, _ in said.values())
    return count / statistics.mean(seconds), said[0][0]


async def cost(model: ModelClient, ids: list[int]) -> tuple[float, float]:
    """Return the median milliseconds of a mask, and the mean bytes that it takes on the wire, in one answer."""
    answer, kept = model.grammars.begin(Grammar(SCHEMA), []), KeptMasks()
    took, sizes = list[float](), list[int]()
    for position in range(len(ids)):
        began = time.perf_counter()
        mask = await answer.mask(ids[:position])
        took.append(time.perf_counter() - began)
        sizes.append(len(kept.pack(position, mask.bits)))
    answer.close()
    return 1000 * statistics.median(took), statistics.mean(sizes)


async def measure(served: Any, tokens: int, rounds: int) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    async with served.client() as model:
        for count in (1, 4):
            free, masked, ids = list[float](), list[float](), list[int]()
            for round_ in range(rounds + 1):
                plain, _ = await rate(model, None, count, tokens)
                bound, ids = await rate(model, Grammar(SCHEMA), count, tokens)
                if round_:  # the first one warms up
                    free.append(plain)
                    masked.append(bound)
            mask_ms, mask_bytes = await cost(model, ids)
            row = {"streams": count, "free": statistics.median(free), "masked": statistics.median(masked)}
            row |= {"ratio": row["masked"] / row["free"], "mask_ms": mask_ms, "mask_bytes": mask_bytes}
            rows.append({name: round(value, 3) for name, value in row.items()})
    return rows


def bench(size: str, servers: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "checkpoint", size)
        with served_model(Path(folder), **parts(MODELS[size]["num_hidden_layers"], servers)) as served:
            rows = trio.run(measure, served, tokens, rounds)
    return [{"size": size, "servers": servers, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=["10M", "100M"], default=["10M", "100M"])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    add_json(parser, "serving/masks")
    options = parser.parse_args()
    print(" model servers streams   free/s masked/s  ratio  mask ms   bytes")
    rows = list[dict[str, Any]]()
    for size in options.sizes:
        for servers in (1, 2):
            for row in bench(size, servers, options.tokens, options.rounds):
                rows.append(row)
                print(
                    f"{size:>6} {servers:7} {row['streams']:7} {row['free']:8.1f} {row['masked']:8.1f}"
                    f" {row['ratio']:6.2f} {row['mask_ms']:8.2f} {row['mask_bytes']:7.0f}"
                )
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
