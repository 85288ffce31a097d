"""Who holds which blocks, and the sentences about those that no session can use."""

from __future__ import annotations

from typing import Any, cast

from swarm.inference.client_view import ServersView
from swarm.inference.coverage import block_states, troubles
from tests.swarm.inference.test_route import NOW, server, view


def test_each_way_to_lack_a_server_has_a_sentence_of_its_own() -> None:
    servers = {
        "good": server(0, 2),
        "full": server(2, 4, pages_free=0),
        "refusing": server(3, 5),
        "silent": server(5, 6),
        "late": server(6, 7, ready_at=NOW + 9),
        "gone soon": server(7, 8, leaving=True),
    }
    states = block_states(view(9, servers), full={"refusing"}, silent={"silent"})
    assert states == ["held", "held", "full", "full", "full", "silent", "arriving", "leaving", "unserved"]
    assert troubles(states) == [
        "all that hold blocks 2 to 4 are full",
        "none that holds block 5 answers",
        "those that are to hold block 6 are not ready yet",
        "all that hold block 7 are about to leave",
        "no server holds block 8",
    ]
    assert troubles(block_states(view(2, servers))) == []


def test_one_server_with_room_is_enough() -> None:
    servers = {"full": server(0, 4, pages_free=0), "free": server(0, 4), "gone soon": server(0, 4, leaving=True)}
    assert block_states(view(4, servers)) == ["held"] * 4


async def test_a_client_tells_a_full_server_from_one_that_is_silent() -> None:
    servers = ServersView(cast(Any, None), cast(Any, None), "run", 2)
    servers.records = {"a": server(0, 1), "b": server(1, 2)}
    servers.conduct.failed("a", full=True)
    servers.conduct.failed("b")
    told = servers.missing("no room for 40 pages")
    assert told.startswith("all that hold block 0 are full; none that holds block 1 answers (no room for 40 pages): ")
    servers.conduct.failed("a")
    assert servers.missing("").startswith("none that holds blocks 0 to 1 answers: ")
