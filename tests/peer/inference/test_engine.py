"""What the engine refuses, and that a refusal changes nothing."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from peer.inference.engine import Engine
from peer.inference.step_output import StepRefused
from peer.ipc.block_messages import PAGE_TOKENS
from peer.ipc.sampling_options import Sampling
from tests.peer.inference.golden_models import expected, prompt_of
from tests.peer.inference.test_golden import chain


def generate(engine: Engine, id: int, prompt: list[int], tokens: int) -> list[int]:
    """Generate with one span that holds the whole model."""
    said: list[int] = []
    engine.submit(id, 0, prompt, None, samples=True)
    while len(said) < tokens:
        for output in engine.step():
            if output.session == id and output.token is not None:
                said.append(output.token)
                engine.submit(id, len(prompt) + len(said) - 1, [output.token], None, samples=True)
    return said


@pytest.fixture
def engine() -> Engine:
    (engine,) = chain("llama3", [(0, 3)])
    return engine


def test_what_a_session_has_is_not_computed_again(engine: Engine) -> None:
    engine.open(1, Sampling())
    assert generate(engine, 1, prompt_of(17), 8) == expected("llama3", 17, 64)[:8]
    engine.submit(1, 0, prompt_of(17), None, samples=True)  # a replay
    assert engine.waiting_tokens == 1, "only the last token, which waited before"


def test_a_gap_is_refused_with_what_is_here(engine: Engine) -> None:
    engine.open(1, Sampling())
    engine.submit(1, 0, [1, 2, 3], None, samples=False)
    with pytest.raises(StepRefused) as refused:
        engine.submit(1, 5, [4], None, samples=False)
    assert refused.value.cause == "gap" and refused.value.have == 3


@pytest.mark.parametrize(
    ("ids", "hidden", "cause"),
    [
        ([199], None, "value"),
        ([3, -1], None, "value"),
        ([1], torch.zeros(1, 32), "shape"),
        ([0] * 3000, None, "shape"),
    ],
)
def test_token_ids_that_are_none_are_refused(
    engine: Engine, ids: list[int], hidden: torch.Tensor | None, cause: str
) -> None:
    engine.open(1, Sampling())
    with pytest.raises(StepRefused) as refused:
        engine.submit(1, 0, ids, hidden, samples=True)
    assert refused.value.cause == cause and engine.waiting_tokens == 0
    assert generate(engine, 1, prompt_of(17), 4) == expected("llama3", 17, 64)[:4]


@pytest.mark.parametrize(
    ("ids", "hidden", "cause"),
    [
        ([5], torch.full((1, 32), float("nan")), "not_finite"),
        ([5], torch.full((1, 32), float("inf")), "not_finite"),
        ([5], torch.zeros(1, 31), "shape"),
        ([5], torch.zeros(32), "shape"),
        ([5], torch.zeros(1, 32, dtype=torch.bfloat16), "shape"),
        ([5, 6], torch.zeros(1, 32), "shape"),
        ([5], None, "shape"),
        ([199], torch.zeros(1, 32), "value"),
    ],
)
def test_hidden_states_that_are_none_are_refused(ids: list[int], hidden: torch.Tensor | None, cause: str) -> None:
    engine = chain("llama3", [(0, 1), (1, 3)])[1]
    engine.open(1, Sampling())
    with pytest.raises(StepRefused) as refused:
        engine.submit(1, 0, ids, hidden, samples=True)
    assert refused.value.cause == cause and engine.waiting_tokens == 0


@pytest.mark.parametrize("spoilt", ["forward", "logits"])
def test_what_is_computed_and_not_finite_breaks_no_other_session(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    """A model of large weights may do so. The session can go on from the position before."""
    compute = getattr(engine.blocks, spoilt)

    def spoil(*arguments: object) -> torch.Tensor:
        result = compute(*arguments)
        monkeypatch.setattr(engine.blocks, spoilt, compute)
        return result.index_fill(0, torch.tensor([0]), float("inf"))

    for id in (1, 2):
        engine.open(id, Sampling(logprobs=1))
        engine.submit(id, 0, [5], None, samples=True)
    engine.submit(1, 1, [6], None, samples=True)
    monkeypatch.setattr(engine.blocks, spoilt, spoil)
    broken, fine = engine.step()
    assert broken.refusal is not None and broken.refusal.cause == "not_finite" and broken.token is None
    assert fine.refusal is None and fine.token is not None
    assert engine.have(1) == engine.waiting_tokens == 0 and engine.have(2) == 1
    engine.submit(1, 0, [5], None, samples=True)
    (again,) = engine.step()
    assert again.token == fine.token and again.logprob == pytest.approx(fine.logprob, rel=1e-5)  # now it is alone


def test_a_session_may_use_a_part_of_the_span() -> None:
    """A server of all blocks is the whole route of one session, and the last server of another."""
    whole, first = chain("llama3", [(0, 3)])[0], chain("llama3", [(0, 2), (2, 3)])[0]
    names, position, ids = (b"page",), 0, prompt_of(17)
    for id in (1, 2):
        whole.open(id, Sampling(), names, None if id == 1 else (2, 3))
    first.open(2, Sampling(), names)
    for token in expected("llama3", 17, 64)[:6]:
        whole.submit(1, position, ids, None, samples=True)
        first.submit(2, position, ids, None, samples=True)
        (behind,) = first.step()
        whole.submit(2, position, behind.ids, behind.hidden, samples=True)
        outputs = [*whole.step(), *whole.step()]
        assert {(output.session, output.token) for output in outputs} == {(1, token), (2, token)}
        position, ids = position + len(ids), [token]
    for id in (1, 2):
        whole.close(id)
    assert whole.open(3, Sampling(), names, (0, 2)) == 0, "other blocks have other keys"
    assert whole.open(4, Sampling(), names, (2, 3)) == 16
    with pytest.raises(StepRefused, match="are not in"):
        first.open(5, Sampling(), (), (1, 3))


@pytest.mark.parametrize("cuts", [[(0, 3)], [(0, 1), (1, 3)]], ids=["one span", "two spans"])
def test_every_span_knows_the_tokens_for_the_penalty(cuts: list[tuple[int, int]]) -> None:
    """Also those of pages that another session has left."""
    penalty, prompt = Sampling(repetition_penalty=1e3), prompt_of(40)
    names, said = (b"a", b"b"), list[list[int]]()
    engines = chain("llama3", cuts)
    for id in (1, 2):
        known = min(engine.open(id, penalty, names) for engine in engines)
        assert known == (0 if id == 1 else 32)
        position, ids, own = known, prompt[known:], list[int]()
        while len(own) < 40:
            hidden = None
            for engine in engines:
                engine.submit(id, position, ids, hidden, samples=True)
                (output,) = engine.step()
                hidden = output.hidden
            assert output.token is not None
            position, ids = position + len(ids), [output.token]
            own.append(output.token)
        for engine in engines:
            engine.close(id)
        said.append(own)
    assert said[0] == said[1]
    assert len({*prompt, *said[0]}) == len({*prompt}) + len(said[0]), "the penalty leaves no token twice"


@pytest.mark.parametrize("cuts", [[(0, 3)], [(0, 1), (1, 3)]], ids=["one span", "two spans"])
def test_a_server_that_takes_over_counts_the_same_tokens(cuts: list[tuple[int, int]]) -> None:
    """It knows only the ids that it is sent, and where the answer begins; the prompt does not count."""
    prompt = prompt_of(40)
    sampling = Sampling(
        0.3, seed=5, frequency_penalty=1.5, presence_penalty=1.0, logit_bias=((3, 4.0), (8, 2.0)), counted_from=40
    )

    def answer(engines: list[Engine], sent: list[int], tokens: int, chosen: Sampling) -> list[int]:
        for engine in engines:
            engine.open(1, chosen)
        position, ids, own = 0, sent, list[int]()
        while len(own) < tokens:
            hidden = None
            for engine in engines:
                engine.submit(1, position, ids, hidden, samples=True)
                (output,) = engine.step()
                hidden = output.hidden
            assert output.token is not None
            position, ids = position + len(ids), [output.token]
            own.append(output.token)
        return own

    whole = answer(chain("llama3", cuts), prompt, 40, sampling)
    for taken in (1, 17, 39):
        assert answer(chain("llama3", cuts), [*prompt, *whole[:taken]], 40 - taken, sampling) == whole[taken:]
    for other in ({"counted_from": 0}, {"counted_from": 41}, {"frequency_penalty": 0.0}, {"logit_bias": ()}):
        assert answer(chain("llama3", cuts), prompt, 40, replace(sampling, **other)) != whole, other


def test_a_bias_beyond_the_vocabulary_is_refused(engine: Engine) -> None:
    with pytest.raises(StepRefused, match="token 199, beyond the vocabulary") as refused:
        engine.open(1, Sampling(logit_bias=((5, 1.0), (199, 1.0))))
    assert refused.value.cause == "value" and engine.sessions == 0
    engine.open(1, Sampling(logit_bias=((198, 100.0),)))
    assert generate(engine, 1, prompt_of(17), 3) == [198] * 3


def test_an_idle_engine_makes_no_step(engine: Engine) -> None:
    assert engine.step() == []
    engine.open(1, Sampling())
    assert engine.step() == []


def test_a_step_takes_no_more_rows_than_it_may(engine: Engine) -> None:
    engine.rows_max = 2
    for id in range(5):
        engine.open(id, Sampling())
        engine.submit(id, 0, [id], None, samples=True)
    assert [[output.session for output in engine.step()] for _ in range(3)] == [[0, 1], [2, 3], [4]]


def test_sessions_that_are_not_open_are_refused(engine: Engine) -> None:
    with pytest.raises(StepRefused, match="not open"):
        engine.submit(9, 0, [1], None, samples=True)
    engine.close(9)


def test_a_closed_session_takes_no_part_in_the_next_step(engine: Engine) -> None:
    for id in (1, 2):
        engine.open(id, Sampling())
        engine.submit(id, 0, prompt_of(600), None, samples=True)
    engine.step()
    engine.close(1)
    assert {output.session for output in (*engine.step(), *engine.step())} == {2} and engine.sessions == 1


def test_a_rewound_session_says_the_same_again(engine: Engine) -> None:
    engine.open(1, Sampling())
    said = generate(engine, 1, prompt_of(17), 12)
    engine.rewind(1, 20)
    engine.submit(1, 20, said[3:4], None, samples=True)
    (output,) = engine.step()
    assert output.token == said[4]


def test_more_sessions_than_pages_are_refused_and_the_others_go_on() -> None:
    (engine,) = chain("llama3", [(0, 3)])
    engine.pool.pages = 6
    engine.open(1, Sampling())
    engine.submit(1, 0, prompt_of(17) * 3, None, samples=True)
    engine.open(2, Sampling())
    engine.open(3, Sampling())
    with pytest.raises(StepRefused) as refused:
        engine.submit(2, 0, prompt_of(17) * 4, None, samples=True)
    assert refused.value.cause == "full"
    with pytest.raises(StepRefused):
        engine.open(4, Sampling())
    engine.step()
    engine.close(1)
    assert generate(engine, 2, prompt_of(17), 4) == expected("llama3", 17, 64)[:4]
    for id in (2, 3):
        engine.close(id)
    assert engine.pool.free_pages == 6


def test_a_session_begins_with_the_pages_of_another_one(engine: Engine) -> None:
    prompt = prompt_of(100)
    names = tuple(b"page %d" % page for page in range(100 // PAGE_TOKENS))
    assert engine.open(1, Sampling(), names) == 0
    said = generate(engine, 1, prompt, 8)
    engine.close(1)
    have = engine.open(2, Sampling(), names)
    assert have == len(names) * PAGE_TOKENS
    engine.submit(2, 0, prompt, None, samples=True)
    assert engine.waiting_tokens == 100 - have
    assert engine.step()[0].token == said[0]


def test_a_session_begins_with_no_page_of_another_client(engine: Engine) -> None:
    """It may have called other tokens so, and how much is here tells what others asked."""
    prompt, other = prompt_of(100), prompt_of(64)[::-1]
    names = tuple(b"page %d" % page for page in range(100 // PAGE_TOKENS))
    engine.open(1, Sampling(), names, client="liar")
    generate(engine, 1, other, 1)
    engine.close(1)
    assert engine.open(2, Sampling(), names, client="ann") == 0
    assert generate(engine, 2, prompt, 4) == expected("llama3", 100, 64)[:4]
    assert engine.open(3, Sampling(), names, client="liar") == 64


def test_a_long_prompt_does_not_hold_up_a_session_that_generates() -> None:
    (engine,) = chain("llama3", [(0, 3)], chunk_tokens=64)
    engine.open(1, Sampling())
    engine.open(2, Sampling())
    engine.submit(1, 0, [5], None, samples=True)
    engine.step()
    engine.submit(2, 0, prompt_of(300) * 6, None, samples=True)
    for position in range(1, 20):
        engine.submit(1, position, [5], None, samples=True)
        outputs = engine.step()
        assert [output.session for output in outputs if output.token is not None and output.session == 1] == [1]
        assert sum(output.count for output in outputs) <= 65
