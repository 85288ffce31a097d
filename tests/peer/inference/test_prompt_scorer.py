"""Log-probabilities of prompts by the engine, against `transformers`' log_softmax of the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch

from peer.inference import prompt_scorer
from peer.inference.engine import Engine
from peer.inference.prompt_scorer import PromptScorer, Score
from peer.ipc.sampling_options import Sampling
from tests.peer.inference.golden_models import prompt_of
from tests.peer.inference.golden_models import reference as transformers_model
from tests.peer.inference.test_golden import chain

COUNT = 5
LENGTH = 300


@lru_cache
def right(family: str, length: int) -> torch.Tensor:
    """Return the log-probabilities (T, V) behind each token of a prompt, by `transformers`."""
    with torch.no_grad():
        logits = transformers_model(family)(torch.tensor([prompt_of(length)])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def scored(
    engines: Sequence[Engine], prompt: Sequence[int], parts: Sequence[int] = (), draws: bool = True, id: int = 1
) -> dict[int, Score]:
    """Return the score of each position that a chain gives; each comes once. `parts`: where the prompt is cut."""
    sampling = Sampling(logprobs=COUNT, prompt_logprobs=True).of_answer(len(prompt))
    found, drawn = dict[int, Score](), list[int]()
    for engine in engines:
        engine.open(id, sampling)
    ends = [*parts, len(prompt)]
    for start, end in zip([0, *parts], ends, strict=True):
        engines[0].submit(id, start, prompt[start:end], None, samples=draws and end == len(prompt))
        for engine, behind in zip(engines, [*engines[1:], None], strict=True):
            while outputs := engine.step():
                for output in outputs:
                    if behind is not None:
                        assert not output.scores
                        last = draws and output.position + output.count == len(prompt)
                        behind.submit(id, output.position, output.ids, output.hidden, samples=last)
                    for number, score in enumerate(output.scores):
                        assert output.scored_from + number not in found
                        found[output.scored_from + number] = score
                    drawn += [] if output.token is None else [output.token]
    if draws:
        (token,) = drawn
        engines[0].submit(id, len(prompt), [token], None, samples=True)
        for output in engines[0].step():
            assert not output.scores, "the prompt has ended"
    return found


def check(found: dict[int, Score], family: str, length: int) -> None:
    expected, prompt = right(family, length), prompt_of(length)
    assert sorted(found) == list(range(1, length))
    for position, (logprob, likeliest) in found.items():
        row = expected[position - 1]
        assert logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
        best = row.topk(COUNT)
        assert [value for _, value in likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(float(row[token]), abs=1e-4) for token, value in likeliest)


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2"])
@pytest.mark.parametrize("cuts", [[(0, 3)], [(0, 1), (1, 3)]])
def test_every_position_of_a_prompt_is_scored_as_transformers_does(family: str, cuts: list[tuple[int, int]]) -> None:
    check(scored(chain(family, cuts, chunk_tokens=32), prompt_of(LENGTH)), family, LENGTH)


@pytest.mark.parametrize("parts", [[1], [2, 3, 4], [31, 33, 100], list(range(1, LENGTH))])
@pytest.mark.parametrize("draws", [True, False])
def test_a_prompt_may_come_in_parts(parts: list[int], draws: bool) -> None:
    """The token behind a part's last row comes with the next part."""
    check(scored(chain("llama3", [(0, 3)], chunk_tokens=32), prompt_of(LENGTH), parts, draws), "llama3", LENGTH)


def test_logits_are_made_for_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scorer, "LOGITS_MAX", 5 * 199 + 1)
    (engine,) = chain("llama3", [(0, 3)], chunk_tokens=64)
    sizes, logits = list[int](), engine.blocks.logits

    def seen(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return logits(rows)

    monkeypatch.setattr(engine.blocks, "logits", seen)
    check(scored([engine], prompt_of(LENGTH)), "llama3", LENGTH)
    assert max(sizes) == 5


def test_a_session_with_scores_uses_no_kept_pages() -> None:
    (engine,) = chain("llama3", [(0, 3)])
    names = [bytes([number]) * 16 for number in range(2)]
    for id in (1, 2):
        assert engine.open(id, Sampling(logprobs=1, prompt_logprobs=True).of_answer(40), names) == 0
        engine.submit(id, 0, prompt_of(40), None, samples=True)
        (output,) = engine.step()
        assert (output.scored_from, len(output.scores)) == (1, 39)
        engine.close(id)


def test_what_was_taken_back_is_scored_again() -> None:
    """A row whose token is to come stays, if it lies before that."""
    (engine,) = chain("llama3", [(0, 3)])
    prompt = prompt_of(40)
    engine.open(1, Sampling(logprobs=1, prompt_logprobs=True).of_answer(40))
    engine.submit(1, 0, prompt[:20], None, samples=False)
    (output,) = engine.step()
    assert (output.scored_from, len(output.scores)) == (1, 19)
    engine.rewind(1, 20)
    engine.submit(1, 20, prompt[20:30], None, samples=False)
    (output,) = engine.step()
    assert (output.scored_from, len(output.scores)) == (20, 10)
    engine.rewind(1, 25)
    engine.submit(1, 25, prompt[25:], None, samples=True)
    (output,) = engine.step()
    assert (output.scored_from, len(output.scores)) == (26, 14), "row 29 is forgotten"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    def logits(rows: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(rows), 10)
        found[1, 3] = bad
        return found

    with pytest.raises(ValueError, match="finite"):
        PromptScorer(4, 2, 10).take(0, torch.zeros(4, 8), [1, 2, 3, 4], logits)


def test_the_engine_breaks_off_where_logits_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = chain("llama3", [(0, 3)])
    engine.open(1, Sampling(logprobs=1, prompt_logprobs=True).of_answer(8))
    monkeypatch.setattr(engine.blocks, "logits", lambda rows: torch.full((len(rows), 199), float("nan")))
    engine.submit(1, 0, prompt_of(6), None, samples=False)
    (output,) = engine.step()
    assert output.refusal is not None and output.refusal.cause == "not_finite" and not output.scores
    assert engine.have(1) == 0
