"""Tokens that are drawn under masks: whichever comes first, the row or the mask, and beside sessions without any."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from peer.inference.engine import Engine
from peer.inference.sampling import gumbel, sample
from peer.inference.step_output import StepOutput, StepRefused
from peer.ipc.sampling_options import Sampling
from tests.peer.inference.golden_models import expected, prompt_of
from tests.peer.inference.test_engine import generate
from tests.peer.inference.test_golden import chain

WARM = Sampling(0.9, 40, 0.95, seed=5, frequency_penalty=0.5, logit_bias=((3, 2.0), (4, -1.0)))
PROMPT = prompt_of(17)
ALL = 1 << 30


@pytest.fixture
def engine() -> Engine:
    (engine,) = chain("llama3", [(0, 3)])
    engine.keeps_logits = True
    return engine


def bits_of(ids: Any, size: int) -> bytes:
    flags = np.zeros(size, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def size_of(engine: Engine) -> int:
    return engine.blocks.config.vocab_size


def allowed_at(position: int, size: int) -> list[int]:
    """Return a mask of about a tenth of the vocabulary, another one at each position."""
    return [id for id in range(size) if (id * 7 + position) % 11 == 0]


def masked(engine: Engine, id: int, count: int, mask_first: bool) -> list[StepOutput]:
    """Generate under masks that come before the row, or after it."""
    size, outputs = size_of(engine), list[StepOutput]()
    engine.submit(id, 0, PROMPT, None, samples=True)
    while len(outputs) < count:
        position = len(PROMPT) + len(outputs)
        bits = bits_of(allowed_at(position, size), size)
        if mask_first:
            assert engine.set_mask(id, position, bits) is None
            (output,) = engine.step()
        else:
            (waits,) = engine.step()
            assert waits.token is None and waits.position + waits.count == position and engine.step() == []
            found = engine.set_mask(id, position, bits)
            assert found is not None and (found.position, found.count) == (position, 0)
            output = found
        assert output.token is not None
        outputs.append(output)
        engine.submit(id, position, [output.token], None, samples=True)
    return outputs


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_a_mask_and_its_row_come_in_any_order(engine: Engine, sampling: Sampling) -> None:
    """The tokens are those of the logits in which all others are -inf."""
    size, said = size_of(engine), list[list[int]]()
    for id, mask_first in ((1, True), (2, False)):
        engine.open(id, replace(sampling, masked=True, counted_from=len(PROMPT)))
        outputs = masked(engine, id, 12, mask_first)
        said.append([output.token for output in outputs if output.token is not None])
        for number, output in enumerate(outputs):
            position = len(PROMPT) + number
            allowed = allowed_at(position, size)
            assert output.logits is not None and output.token in allowed
            least = torch.full((size,), -torch.inf)
            least[allowed] = output.logits[allowed]
            seen = [*PROMPT, *said[-1][:number]]
            assert output.token == sample(least, replace(sampling, counted_from=len(PROMPT)), position, seen)
        engine.close(id)
    assert said[0] == said[1]


def test_sessions_without_masks_do_not_wait(engine: Engine) -> None:
    """They take part in the same steps, and say what they say alone."""
    for id in (1, 2):
        engine.open(id, Sampling(masked=True), client=f"c{id}")
        engine.submit(id, 0, PROMPT, None, samples=True)
    engine.open(3, Sampling(), client="c3")
    assert generate(engine, 3, PROMPT, 20) == expected("llama3", 17, 64)[:20]
    position, size = len(PROMPT), size_of(engine)
    for id in (1, 2):
        output = engine.set_mask(id, position, bits_of(range(size), size))
        assert output is not None and output.token == expected("llama3", 17, 64)[0]


def test_a_mask_comes_before_all_else() -> None:
    """Whatever bias, penalty or filter: no forbidden token, and of the allowed ones those that they leave."""
    logits = torch.tensor([9.0, 8.0, 1.0, 0.5, -3.0])
    mask = torch.tensor([-math.inf, -math.inf, math.inf, math.inf, math.inf])
    assert sample(logits, Sampling(), 0, (), mask) == 2
    assert sample(logits, Sampling(logit_bias=((0, 100.0),)), 0, (), mask) == 2
    assert sample(logits, Sampling(logit_bias=((2, -100.0),)), 0, (), mask) == 3
    assert sample(logits, Sampling(repetition_penalty=1000.0), 0, (0, 1, 2, 3), mask) == 2
    for seed in range(50):
        assert sample(logits, Sampling(5.0, top_k=2, seed=seed), 1, (), mask) in (2, 3)
        assert sample(logits, Sampling(5.0, top_p=0.01, seed=seed), 1, (), mask) == 2
        assert sample(logits, Sampling(1.0, min_p=0.9, seed=seed), 1, (), mask) == 2
        noisy = (logits + gumbel(seed, 7, 5))[2:]
        assert sample(logits, Sampling(1.0, seed=seed), 7, (), mask) == 2 + int(noisy.argmax())


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    engine.open(1, Sampling(logprobs=3, masked=True))
    engine.submit(1, 0, PROMPT, None, samples=True)
    engine.step()
    likeliest = expected("llama3", 17, 64)[0]
    output = engine.set_mask(1, len(PROMPT), bits_of([likeliest ^ 1], size_of(engine)))
    assert output is not None and output.logits is not None and output.token == likeliest ^ 1
    logprobs = output.logits.log_softmax(-1)
    assert output.likeliest[0] == (likeliest, pytest.approx(float(logprobs[likeliest])))
    assert output.logprob == pytest.approx(float(logprobs[likeliest ^ 1]))
    assert output.logprob < output.likeliest[0][1]


def test_a_rewound_row_waits_no_more(engine: Engine) -> None:
    size, end = size_of(engine), len(PROMPT)
    every = bits_of(range(size), size)
    engine.open(1, Sampling(masked=True))
    engine.submit(1, 0, PROMPT, None, samples=True)
    engine.step()
    engine.rewind(1, end - 1)
    assert engine.set_mask(1, end, every) is None
    engine.submit(1, end - 1, PROMPT[-1:], None, samples=True)
    (output,) = engine.step()
    assert output.token == expected("llama3", 17, 64)[0], "the mask was there"
    engine.rewind(1, end - 1)
    engine.submit(1, end - 1, PROMPT[-1:], None, samples=True)
    (output,) = engine.step()
    assert output.token == expected("llama3", 17, 64)[0], "it is still there"


def test_a_server_that_takes_over_may_have_two_rows_that_wait(engine: Engine) -> None:
    """The lost one had drawn a token that the client does not have: the first server sends it, too."""
    size, end, right = size_of(engine), len(PROMPT), expected("llama3", 17, 64)
    engine.open(1, Sampling(masked=True))
    engine.submit(1, 0, PROMPT, None, samples=True)
    engine.step()
    engine.submit(1, end, right[:1], None, samples=True)
    engine.step()
    for position in (end, end + 1):
        output = engine.set_mask(1, position, bits_of(range(size), size))
        assert output is not None and output.token == right[position - end]


def test_a_wrong_mask_is_refused_and_the_session_goes_on(engine: Engine) -> None:
    size, end = size_of(engine), len(PROMPT)
    engine.open(1, Sampling(masked=True))
    engine.open(2, Sampling())
    engine.submit(1, 0, PROMPT, None, samples=True)
    engine.step()
    for id, bits in ((1, b""), (1, bytes(size)), (1, bytes((size + 7) // 8)), (2, bits_of([1], size)), (3, b"")):
        with pytest.raises(StepRefused):
            engine.set_mask(id, end, bits)
    assert engine.set_mask(1, end + 1, bits_of([1], size)) is None, "of another position"
    output = engine.set_mask(1, end, bits_of([4], size))
    assert output is not None and output.token == 4
