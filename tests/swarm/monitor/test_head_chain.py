"""The chain of heads that the monitor keeps: news, gaps, undone rounds, bounds."""

from __future__ import annotations

import msgspec
import pytest

from swarm.monitor import head_chain
from swarm.monitor.head_chain import HeadChain
from swarm.protocol.head import Head
from tests.swarm.monitor.scenes import finite, heads_of, next_head


def chained(heads: list[Head]) -> HeadChain:
    chain = HeadChain()
    for place, head in enumerate(heads):
        chain.advance(head, [], float(place))
    return chain


def test_news_is_what_is_further() -> None:
    heads = heads_of(finite(), "abc", 3)
    chain = chained(heads)
    assert chain.heads == heads and not any(chain.is_news(head) for head in heads)
    assert chain.is_news(next_head(heads[-1]))
    assert (chain.counts["committed"], chain.counts["regroups"], chain.counts["merged"]) == (3, 1, 9)


def test_rounds_that_came_between_two_readings_are_counted_once() -> None:
    heads = heads_of(finite(), "abc", 4)
    chain = chained(heads[:3])
    chain.advance(heads[-1], heads[3:-1], 9.0)
    assert chain.heads == heads and chain.counts["committed"] == 4


def test_undone_rounds_are_forgotten() -> None:
    heads = heads_of(finite(), "abc", 4)
    chain = chained(heads)
    again = msgspec.structs.replace(heads[3], term=2, previous=heads[3].hash, attempt=-1)
    chain.advance(again, [heads[2], heads[3]], 9.0)
    assert chain.heads == [*heads[:4], again] and chain.counts["regroups"] == 2


def test_a_gap_makes_a_new_chain() -> None:
    heads = heads_of(finite(), "abc", 6)
    chain = chained(heads[:3])
    chain.advance(heads[-1], heads[5:-1], 9.0)
    assert chain.heads == heads[5:] and chain.wants_older and chain.counts["committed"] == 1
    chain.extend_back(heads[:5])
    assert chain.heads == heads and not chain.wants_older


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_chain, "HEADS_MAX", 4)
    chain = chained(heads_of(finite(), "abc", 9))
    assert [head.round for head in chain.heads] == [6, 7, 8, 9] and len(chain.seen_at) == 4 and not chain.wants_older
