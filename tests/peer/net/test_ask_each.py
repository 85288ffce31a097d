"""One call to several peers at once."""

from __future__ import annotations

from peer.errors import BarnraiseError, DialError, RemoteError
from peer.identity import Identity
from peer.net.rpc import ask_each
from tests.peer.net.test_rpc import ECHO, UNSERVED, Number, hosts


async def test_answers_come_by_peer_and_failures_are_skipped_or_told() -> None:
    absent = Identity.generate().peer_id
    async with hosts() as (a, b, _):
        bodies = {b.peer_id: Number(1), absent: Number(2)}
        assert await ask_each(a.rpc, ECHO, bodies, 60.0) == {b.peer_id: Number(2)}
        failures: dict[str, BarnraiseError] = {}
        assert await ask_each(a.rpc, UNSERVED, bodies, 60.0, failures.__setitem__) == {}
        assert isinstance(failures[b.peer_id], RemoteError) and isinstance(failures[absent], DialError)
        assert await ask_each(a.rpc, ECHO, {}, 60.0) == {}
