"""Tiny random models of each family, and prompts, made from counters: the same on every machine, and no file is kept.

Their greedy tokens and logits by `transformers` are in `goldens`, written by

    python -m tests.peer.inference.golden_models
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

GOLDENS: Final = Path(__file__).parent / "goldens"
TOKENS: Final = 256
LENGTHS: Final = (1, 2, 17, 33, 64, 300, 700, 2000)
SPREAD: Final = 0.2
LEAD_MIN: Final = 2e-3
"""What the likeliest token leads by, everywhere in an answer: with less, rounding alone could choose another one."""
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 199,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2600,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": 40, "head_dim": 12}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


class GoldenAnswer(msgspec.Struct):
    """What `transformers` says to one prompt."""

    length: int
    seed: int
    tokens: list[int]
    logits: list[float]
    """Behind the prompt."""


class Golden(msgspec.Struct):
    """One family's model and its answers."""

    config: dict[str, Any]
    answers: list[GoldenAnswer]


def read_golden(family: str) -> Golden:
    return msgspec.json.decode((GOLDENS / f"{family}.json").read_bytes(), type=Golden)


def parameter(name: str, shape: Iterable[int]) -> torch.Tensor:
    """Return the values of a parameter by its name; those of norms and biases lie around what they mostly are."""
    size = tuple(shape)
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(int(np.prod(size)))
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
    values = torch.from_numpy((uniform * 12**0.5 * SPREAD).astype(np.float32)).reshape(size)
    return values + 1.0 if "norm" in name else values


def prompt_of(length: int, seed: int = 0) -> list[int]:
    bits = np.random.Philox(key=np.array([length, seed], dtype=np.uint64)).random_raw(length)
    return [int(one) for one in bits % np.uint64(_SIZES["vocab_size"])]


def _answer(model: Any, length: int) -> GoldenAnswer:
    """Return the first answer in which no token is a near thing."""
    for seed in itertools.count():
        prompt, said, least = prompt_of(length, seed), list[int](), 1e9
        with torch.no_grad():
            out = model(torch.tensor([prompt]), use_cache=True)
            first = out.logits[0, -1]
            while len(said) < TOKENS and least > LEAD_MIN:
                best = out.logits[0, -1].topk(2)
                least = min(least, float(best.values[0] - best.values[1]))
                said.append(int(best.indices[0]))
                out = model(torch.tensor([said[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        if least > LEAD_MIN:
            return GoldenAnswer(length, seed, said, [round(value, 6) for value in first.tolist()])
    raise AssertionError


@lru_cache(maxsize=8)
def reference(family: str) -> Any:
    """Return a model of `transformers`, for tests that need its files or its hidden states."""
    import transformers

    name, options = FAMILIES[family]
    config = getattr(transformers, name)(**_SIZES | options)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for called, values in model.named_parameters():
        values.data.copy_(parameter(called, values.shape))
    return model


@lru_cache(maxsize=64)
def expected(family: str, length: int, tokens: int) -> list[int]:
    """Return what it says to the prompt of that length."""
    prompt = torch.tensor([prompt_of(length)])
    said = reference(family).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return [int(token) for token in said[0, length:]]


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for family in FAMILIES:
        model = reference(family)
        told = {**json.loads(model.config.to_json_string()), "torch_dtype": "float32"}
        golden = Golden(told, [_answer(model, length) for length in LENGTHS])
        (GOLDENS / f"{family}.json").write_bytes(msgspec.json.encode(golden) + b"\n")


if __name__ == "__main__":
    main()
