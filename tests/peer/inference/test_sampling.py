"""Sampling against its definitions in float64, and against `transformers`' filters."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.inference.sampling import adjusted, filtered, gumbel, sample, top_logprobs
from peer.ipc.sampling_options import MASKS, OPTIONS, Sampling

SCORES = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.5), Sampling(2.0, top_k=4), Sampling(1.0, top_p=0.7), Sampling(1.0, min_p=0.2)],
    ids=["plain", "cold", "top-k", "top-p", "min-p"],
)
def test_draws_have_the_probabilities_of_the_softmax(sampling: Sampling) -> None:
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.9, -3.0, 1.7])
    draws = 5_000
    counts = np.zeros(len(logits))
    for position in range(draws):
        counts[sample(logits, sampling, position)] += 1
    wanted = filtered(logits / sampling.temperature, sampling).double().softmax(-1).numpy()
    assert np.abs(counts / draws - wanted).max() < 4 * np.sqrt(0.25 / draws)
    assert not counts[wanted == 0].any()


def test_the_same_seed_and_position_draw_the_same_token() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    one = [sample(logits, Sampling(1.0, seed=7), position) for position in range(50)]
    assert one == [sample(logits, Sampling(1.0, seed=7), position) for position in range(50)]
    assert one != [sample(logits, Sampling(1.0, seed=8), position) for position in range(50)]
    assert len(set(one)) > 20


def test_the_noise_is_gumbels() -> None:
    """Mean 0.5772 (Euler) and variance pi²/6."""
    noise = torch.cat([gumbel(3, position, 10_000) for position in range(20)]).double()
    assert abs(float(noise.mean()) - 0.5772157) < 0.01
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.03
    assert torch.isfinite(noise).all()


@settings(max_examples=200, deadline=None)
@given(SCORES, st.integers(0, 45), st.floats(0, 1, width=32), st.floats(0, 1, width=32))
def test_filters_are_those_of_transformers(scores: list[float], top_k: int, top_p: float, min_p: float) -> None:
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids = cast(torch.LongTensor, torch.zeros(1, 1, dtype=torch.int64))
    values = torch.tensor(scores)
    if len(set(values.tolist())) < len(scores):
        return  # equal scores are cut in another order there
    for sampling, warper in (
        (Sampling(1.0, top_k=top_k), TopKLogitsWarper(top_k) if top_k else None),
        (Sampling(1.0, top_p=top_p), TopPLogitsWarper(top_p) if 0 < top_p < 1 else None),
        (Sampling(1.0, min_p=min_p), MinPLogitsWarper(min_p)),
    ):
        if warper is None:
            continue
        theirs, ours = warper(ids, cast(torch.FloatTensor, values.unsqueeze(0)))[0], filtered(values, sampling)
        total = values.double().softmax(-1).sort(descending=True).values.cumsum(-1)
        near_edge = sampling.top_p < 1 and bool(((total - top_p).abs() < 1e-5).any())
        assert near_edge or torch.equal(theirs, ours)


def test_the_penalty_lowers_what_was_seen() -> None:
    """CTRL (1909.05858): divided where positive, multiplied where not."""
    logits = torch.tensor([2.0, 1.5, -1.0])
    assert sample(logits, Sampling(repetition_penalty=2.0), 0, seen=[0]) == 1
    assert sample(torch.tensor([-1.0, -1.5]), Sampling(repetition_penalty=2.0), 0, seen=[0]) == 1
    assert sample(logits, Sampling(repetition_penalty=2.0), 0) == 0


PENALTIES = st.floats(-2, 2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-20, 20), min_size=12, max_size=12),
    st.lists(st.integers(0, 11), max_size=40),
    st.integers(0, 20),
    *(PENALTIES, PENALTIES),
    st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=12),
)
def test_biases_and_penalties_are_openais(
    values: list[float], seen: list[int], start: int, frequency: float, presence: float, bias: dict[int, float]
) -> None:
    """In float64: mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counting the tokens of the answer alone."""
    wanted = np.array(values) + np.array([bias.get(token, 0.0) for token in range(12)])
    counts = np.bincount(np.array(seen[start:], dtype=np.int64), minlength=12)
    wanted = wanted - counts * frequency - (counts > 0) * presence
    sampling = Sampling(
        frequency_penalty=frequency, presence_penalty=presence, logit_bias=tuple(bias.items()), counted_from=start
    )
    logits = torch.tensor(values)
    before = logits.clone()
    found = adjusted(logits, sampling, seen if sampling.looks_back else ())
    assert np.abs(found.double().numpy() - wanted).max() < 1e-4
    assert torch.equal(logits, before), "what is reported as log-probabilities stays the model's"
    if np.diff(np.sort(wanted)[-2:]) > 1e-3:
        assert sample(logits, sampling, len(seen), seen) == wanted.argmax()


def test_penalties_come_after_the_bias_and_the_penalty_on_repetition() -> None:
    sampling = Sampling(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0, logit_bias=((0, 3.0),))
    found = adjusted(torch.tensor([1.0, -1.0, 2.0]), sampling, [0, 0, 1])
    assert found.tolist() == [(1 + 3) / 2 - 2 * 0.5 - 1, -2.0 - 0.5 - 1, 2.0]


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(2))
    logprob, likeliest = top_logprobs(logits, 5, 3)
    wanted = logits.double().log_softmax(-1)
    assert abs(logprob - float(wanted[5])) < 1e-6
    assert [token for token, _ in likeliest] == wanted.topk(3).indices.tolist()


NAN = float("nan")


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"top_p": 1.5},
        {"min_p": NAN},
        {"seed": -1},
        {"frequency_penalty": 2.1},
        {"frequency_penalty": NAN},
        {"presence_penalty": -2.1},
        {"logit_bias": ((0, 100.5),)},
        {"logit_bias": ((0, NAN),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1 << 24, 1.0),)},
        {"logit_bias": ((5, 1.0), (5, 2.0))},
        {"logit_bias": tuple((token, 1.0) for token in range(301))},
        {"counted_from": -1},
        {"counted_from": (1 << 24) + 1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name_and_so_they_are_on_the_wire(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)
    plain = msgspec.structs.asdict(Sampling())
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list({**plain, **bad}.values())), type=Sampling)


def test_settings_of_an_older_client_are_read_and_an_older_server_reads_those_of_a_newer_one() -> None:
    """It would ignore what it does not know: so its record must say that it knows (`ServerRecord.options`)."""
    old = msgspec.msgpack.encode([0.5, 4, 0.9, 0.1, 1.2, 7, 3])
    assert msgspec.msgpack.decode(old, type=Sampling) == Sampling(0.5, 4, 0.9, 0.1, 1.2, 7, 3)
    assert Sampling(0.5, 4, 0.9, 0.1, 1.2, 7, 3).options == ()
    for new in ({"frequency_penalty": 1.0}, {"presence_penalty": -1.0}, {"logit_bias": ((1, 1.0),)}):
        assert Sampling(**new).options == ("penalties",)
    assert Sampling(masked=True).options == (MASKS,)
    assert Sampling(masked=True, presence_penalty=1.0, logprobs=1, prompt_logprobs=True).options == OPTIONS
