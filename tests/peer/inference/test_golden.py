"""The engine against what `transformers` says (goldens made by `golden_models`): one span or a chain of them."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
import torch

from peer.config import ModelConfig
from peer.footprint.parameters import parameter_shapes
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span, spans_of
from peer.model.hub_config import read_served_config
from tests.peer.inference.golden_models import FAMILIES, LENGTHS, TOKENS, parameter, prompt_of, read_golden

ERROR_MAX = 2e-4
"""Of the logits' spread."""
OTHERS = set(FAMILIES) - {"llama3", "mistral"}
"""Of which `make test` looks at a session alone: what differs between families is no matter of company."""
DRAWN = Sampling(temperature=0.9, top_p=0.95, seed=7)


@lru_cache(maxsize=8)
def model_of(family: str) -> tuple[ModelConfig, int | None, dict[str, torch.Tensor]]:
    """Return a model's configuration, its window and its parameters."""
    config, window = read_served_config(json.dumps(read_golden(family).config).encode())
    return config, window, {name: parameter(name, shape) for name, shape in parameter_shapes(config)}


def chain(family: str, cuts: list[tuple[int, int]], chunk_tokens: int = 512, rows_max: int = 64) -> list[Engine]:
    config, window, weights = model_of(family)
    device = torch.device("cpu")
    return [
        Engine(SpanBlocks(config, span, weights.__getitem__, device, window), 4000, rows_max, chunk_tokens)
        for span in spans_of(cuts)
    ]


def run(
    engines: list[Engine], prompts: list[list[int]], tokens: int, sampling: Sampling | None = None
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Generate for all prompts at once; return each one's tokens and the logits of its first one."""
    said: list[list[int]] = [[] for _ in prompts]
    logits: dict[int, torch.Tensor] = {}
    engines[-1].keeps_logits = True
    for id, prompt in enumerate(prompts):
        for engine in engines:
            engine.open(id, sampling or Sampling())
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


def check(family: str, cuts: list[tuple[int, int]], chunk_tokens: int, lengths: tuple[int, ...], rows: int) -> None:
    """Generate behind the prompts of these lengths at once, and compare with the goldens."""
    golden = [answer for answer in read_golden(family).answers if answer.length in lengths]
    prompts = [prompt_of(answer.length, answer.seed) for answer in golden]
    said, logits = run(chain(family, cuts, chunk_tokens, rows), prompts, TOKENS)
    for answer, tokens, ours in zip(golden, said, logits, strict=True):
        expected = torch.tensor(answer.logits)
        assert float((ours - expected).abs().max() / expected.std()) < ERROR_MAX
        assert tokens == answer.tokens


@pytest.mark.parametrize(
    "family", ["llama3", "mistral", *(pytest.param(one, marks=pytest.mark.soak) for one in FAMILIES if one in OTHERS)]
)
def test_eight_sessions_at_once_say_what_transformers_says(family: str) -> None:
    """Prompts of 1 to 2,000 tokens in chunks of 64. Mistral's window of 40 is crossed by them and by the answers."""
    check(family, [(0, 3)], 64, LENGTHS, 64)


@pytest.mark.parametrize(("family", "length"), list(zip(FAMILIES, (1, 17, 2000, 17, 2000), strict=True)))
def test_a_chain_of_spans_says_what_transformers_says(family: str, length: int) -> None:
    check(family, [(0, 1), (1, 3)], 512, (length,), 64)


@pytest.mark.soak
@pytest.mark.parametrize("cuts", [[(0, 3)], [(0, 2), (2, 3)]], ids=["one span", "two spans"])
@pytest.mark.parametrize("chunk_tokens", [64, 512])
@pytest.mark.parametrize("lengths", [(1,), (17,), (2000,), LENGTHS], ids=["1", "17", "2000", "eight"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_says_what_transformers_says(
    family: str, lengths: tuple[int, ...], chunk_tokens: int, cuts: list[tuple[int, int]]
) -> None:
    check(family, cuts, chunk_tokens, lengths, 5)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=7)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("family", ["llama3", "mistral"])
def test_a_session_says_the_same_alone_in_company_replayed_and_checked(family: str, sampling: Sampling) -> None:
    """Speculation and failover stand on this. Mistral's window is crossed."""
    prompts, tokens = [prompt_of(length, 1) for length in (90, 1, 17, 33, 5, 64, 120, 8)], 48
    [alone], _ = run(chain(family, [(0, 3)]), prompts[:1], tokens, sampling)
    assert run(chain(family, [(0, 3)], 32), prompts, tokens, sampling)[0][0] == alone
    for already in (1, 17, 47):  # replayed from its ids, in another chunking
        [rest], _ = run(chain(family, [(0, 3)], 7), [prompts[0] + alone[:already]], tokens - already, sampling)
        assert rest == alone[already:]
    for drafted in (2, 4, 8):  # so many known tokens go in at once, and the next one is drawn behind them
        [engine] = chain(family, [(0, 3)])
        engine.open(0, sampling)
        engine.submit(0, 0, prompts[0], None, samples=True)
        assert [output.token for output in engine.step()] == alone[:1]
        for at in range(0, tokens - drafted, drafted):
            engine.submit(0, len(prompts[0]) + at, alone[at : at + drafted], None, samples=True)
            assert [output.token for output in engine.step()] == [alone[at + drafted]]


def test_a_span_of_a_tied_model_has_a_head_of_its_own() -> None:
    blocks = chain("qwen2", [(0, 1), (1, 3)])[1].blocks
    assert blocks.span == Span(1, 3, 3) and blocks._embedding is None and blocks._head is not None


def test_the_window_of_mistral_is_read_and_training_stays_within_it() -> None:
    config, window, _ = model_of("mistral")
    assert window == 40 and config.max_seq_len == 2600
