"""The engine against `transformers`: tiny random models of each family, one span or a chain of them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span, spans_of
from peer.model.hub_config import read_served_config

WINDOW = 40
SIZES: dict[str, Any] = {
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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 12}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


@lru_cache(maxsize=8)
def reference(family: str) -> tuple[Any, Any, int | None]:
    """Return a random model of `transformers`, its ModelConfig and its window."""
    import transformers

    name, options = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, name)(**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15)
    content = json.dumps({**config.to_dict(), "torch_dtype": "float32"}).encode()
    ours, window = read_served_config(content)
    return model, ours, window


def chain(family: str, cuts: list[tuple[int, int]], **options: Any) -> list[Engine]:
    model, config, window = reference(family)
    weights = model.state_dict()
    device = torch.device("cpu")
    return [
        Engine(SpanBlocks(config, span, weights.__getitem__, device, window), 4000, **options)
        for span in spans_of(cuts)
    ]


def run(engines: list[Engine], prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Generate greedily for all prompts at once; return each one's tokens and the logits of its first one."""
    said: list[list[int]] = [[] for _ in prompts]
    logits: dict[int, torch.Tensor] = {}
    engines[-1].keeps_logits = True
    for id, prompt in enumerate(prompts):
        for engine in engines:
            engine.open(id, Sampling())
        engines[0].submit(id, 0, prompt, None, samples=True)
    while any(len(each) < tokens for each in said):
        for engine, behind in zip(engines, [*engines[1:], None], strict=True):
            for output in engine.step():
                if behind is not None:
                    assert output.hidden is not None
                    last = output.position + output.count >= len(prompts[output.session])
                    behind.submit(output.session, output.position, output.ids, output.hidden, samples=last)
                elif output.token is not None and len(said[output.session]) < tokens:
                    said[output.session].append(output.token)
                    assert output.logits is not None
                    logits.setdefault(output.session, output.logits)
                    if len(said[output.session]) < tokens:
                        position = len(prompts[output.session]) + len(said[output.session]) - 1
                        engines[0].submit(output.session, position, [output.token], None, samples=True)
    for engine in engines:
        for id in range(len(prompts)):
            engine.close(id)
    return said, [logits[id] for id in range(len(prompts))]


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist()


@lru_cache(maxsize=64)
def expected(family: str, length: int, tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return what `transformers` says greedily to the prompt of that length, and its logits behind it."""
    model, _, _ = reference(family)
    prompt = prompt_of(length)
    said: list[int] = []
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        first = out.logits[0, -1]
        while True:
            said.append(int(out.logits[0, -1].argmax()))
            if len(said) == tokens:
                return said, first
            out = model(torch.tensor([said[-1:]]), past_key_values=out.past_key_values, use_cache=True)


@pytest.mark.parametrize("cuts", [[(0, 3)], [(0, 1), (1, 3)]], ids=["one span", "two spans"])
@pytest.mark.parametrize("length", [1, 17, 2000])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logits_are_those_of_transformers(
    family: str, length: int, cuts: list[tuple[int, int]]
) -> None:
    """The prompt of 2,000 comes in chunks; Mistral's window of 40 is crossed by it, and by what is generated."""
    prompt = prompt_of(length)
    tokens, logits = expected(family, length, 256)
    said, ours = run(chain(family, cuts), [prompt], 256)
    assert torch.allclose(ours[0], logits, atol=1e-4, rtol=0)
    assert said[0] == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_sessions_at_once_say_what_each_would_say_alone(family: str) -> None:
    lengths = (1, 2, 17, 33, 41, 64, 100, 300)
    prompts = [prompt_of(length) for length in lengths]
    engines = chain(family, [(0, 2), (2, 3)], chunk_tokens=48, rows_max=5)
    said, _ = run(engines, prompts, 64)
    assert said == [expected(family, length, 64)[0] for length in lengths]
    assert all(engine.pool.free_pages == engine.pool.pages for engine in engines)


def test_a_span_of_a_tied_model_has_a_head_of_its_own() -> None:
    blocks = chain("qwen2", [(0, 1), (1, 3)])[1].blocks
    assert blocks.span == Span(1, 3, 3) and blocks._embedding is None and blocks._head is not None


def test_the_window_of_mistral_is_read_and_training_stays_within_it(tmp_path: Path) -> None:
    _, config, window = reference("mistral")
    assert window == WINDOW and config.max_seq_len == 2600
