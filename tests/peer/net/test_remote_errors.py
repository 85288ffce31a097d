"""The error that a peer answers with is cut where it leaves and where it comes in."""

from __future__ import annotations

import pytest

from peer.errors import NotAdmitted, RemoteError
from peer.net.method import Call
from tests.peer.net.test_rpc import FAIL, Number, hosts


@pytest.mark.parametrize("honest", [True, False])
async def test_a_long_message_is_cut_at_both_ends(monkeypatch: pytest.MonkeyPatch, honest: bool) -> None:
    if not honest:
        monkeypatch.setattr("peer.net.rpc_server.cut", lambda text, most: text)
    wrong = type("NotAdmitted" + "x" * 100, (NotAdmitted,), {})

    async def fail(call: Call[Number]) -> Number:
        raise wrong("begin " + "x" * 15_000 + ": the remedy")

    async with hosts() as (a, b, _):
        b.rpc.register(FAIL, fail)
        with pytest.raises(RemoteError) as caught:
            await a.rpc.call(b.peer_id, FAIL, Number(0), timeout_s=20)
    message = caught.value.message
    assert len(message) == 500 and message.startswith("begin x") and message.endswith(": the remedy")
    assert str(caught.value) == message and len(caught.value.code) == 64
