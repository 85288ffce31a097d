"""After a revision every server gets what it lacks, from whoever has it, and no token is drawn twice or never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.inference.resume import GAPS_MAX, resume


class Chain:
    """Servers that keep what they have sent, as far back as they have computed it for this session."""

    def __init__(self, haves: list[int], fresh: list[bool]) -> None:
        self.have = list(haves)
        self.sent_from = [have if new else 0 for have, new in zip(haves, fresh, strict=True)]
        self.parked = [True] * len(haves)  # outputs wait until the client says where the next server stands
        self.drawn = list[int]()

    def feed(self, server: int, start: int, end: int) -> None:
        """Give a server positions [start, end); it computes what it lacks, and passes that on."""
        assert start <= self.have[server], "a gap"
        if end <= self.have[server]:
            return
        begin, self.have[server] = self.have[server], end
        if server + 1 < len(self.have):
            if not self.parked[server]:
                self.feed(server + 1, begin, end)
        else:
            self.drawn.append(end)

    def go_on(self, known: int, fresh: list[bool], gaps: int = 0) -> None:
        then = resume(self.have, known, fresh, gaps, kept_from=self.sent_from)
        for server, position in then.rewinds.items():
            self.have[server] = min(self.have[server], position)
            self.sent_from[server] = min(self.sent_from[server], position)
        for server, position in then.replays.items():
            self.parked[server] = False
            if position < self.have[server]:
                assert position >= self.sent_from[server], "it has not kept that"
                self.feed(server + 1, position, self.have[server])
        if then.feed is not None:
            self.feed(0, then.feed, known)


@given(st.integers(1, 50), st.integers(1, 5), st.data())
def test_replaced_servers_catch_up_and_the_next_token_is_drawn(known: int, count: int, data: st.DataObject) -> None:
    """Old servers have nearly all, the first at least what the next has; new ones nothing."""
    fresh = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    old = sorted(
        data.draw(st.lists(st.integers(max(0, known - 3), known), min_size=count, max_size=count)), reverse=True
    )
    if not fresh[-1] and old[-1] == known:
        old[-1] = known - 1  # it has drawn the next token, and told the client: then the client would know it
    chain = Chain([0 if new else have for new, have in zip(fresh, old, strict=True)], fresh)
    chain.go_on(known, fresh)
    assert chain.have == [known] * count
    assert chain.drawn and chain.drawn[-1] == known


@given(st.integers(1, 200), st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_a_session_that_begins_with_kept_pages_begins_where_all_have_them(known: int, pages: list[int]) -> None:
    haves = [min(16 * page, (known - 1) // 16 * 16) for page in pages]
    chain = Chain(haves, [True] * len(haves))
    chain.go_on(known, [True] * len(haves))
    assert chain.have == [known] * len(haves) and chain.drawn == [known]


@given(st.integers(33, 200), st.integers(2, 5), st.data())
def test_servers_compute_again_what_they_have_not_kept(known: int, count: int, data: st.DataObject) -> None:
    """As those do that began with the pages of another session's prompt, or have let go of the oldest outputs."""
    fresh = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    kept = data.draw(st.lists(st.integers(0, known - 1), min_size=count, max_size=count))
    chain = Chain([0 if new else known - (at == count - 1) for at, new in enumerate(fresh)], fresh)
    chain.sent_from = [0 if new else start for new, start in zip(fresh, kept, strict=True)]
    chain.go_on(known, fresh)
    assert chain.have == [known] * count and chain.drawn[-1] == known


def test_a_last_server_whose_flow_was_lost_draws_again() -> None:
    chain = Chain([10, 10], [False, True])
    chain.sent_from = [0, 0]
    chain.go_on(10, [False, True])
    assert chain.drawn == [10]


def test_after_many_gaps_all_is_computed_again() -> None:
    chain = Chain([9, 4, 7], [False] * 3)
    chain.sent_from = [6, 6, 6]
    chain.go_on(9, [False] * 3, gaps=GAPS_MAX)
    assert chain.have == [9] * 3 and chain.drawn == [9]
