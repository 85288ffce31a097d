"""A gossip run's peer that leaves with a full disk: the last one waits for room, and says what is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from trio.testing import MockClock

from peer.errors import ResourceError
from peer.events import Event, EventLog
from swarm.gossip.peer import _GossipParticipant
from swarm.protocol.head import Head
from tests.swarm.support.stage_commits import begun
from tests.swarm.training.test_roles import run_of


class Leaving:
    """A peer at round 7. Its disk takes a checkpoint from the try number `takes` on."""

    def __init__(self, takes: int, others: tuple[str, ...] = ()) -> None:
        first = run_of(1).first_head(0)
        self.begun = begun(first)
        self.tries, self.takes, self.seen = 0, takes, list[Event]()
        log = EventLog()
        self._subscription = log.subscribed(self.seen.append)
        self._subscription.__enter__()
        self.peer: Any = SimpleNamespace(
            _begun=self.begun,
            _me=SimpleNamespace(peer="me"),
            _context=SimpleNamespace(home=SimpleNamespace(path=Path("home")), host=SimpleNamespace(events=log)),
            _store=SimpleNamespace(list=lambda: [SimpleNamespace(round=3)]),
            _save=self._save,
            others=lambda: dict.fromkeys(others),
        )

    async def _save(self, head: Head) -> bool:
        self.tries += 1
        return self.tries >= self.takes

    async def leave(self, round: int = 7) -> list[str]:
        """Leave; return the events' names."""
        head = msgspec.structs.replace(self.begun, round=round) if round else self.begun
        await _GossipParticipant._save_last(cast(Any, self.peer), head)
        return [event.name for event in self.seen]


async def test_the_last_peer_waits_until_there_is_room(autojump_clock: MockClock) -> None:
    leaving = Leaving(takes=5)
    assert await leaving.leave() == ["state_at_risk"] * 4 and leaving.tries == 5


async def test_the_last_peer_says_what_is_lost(autojump_clock: MockClock) -> None:
    leaving = Leaving(takes=1 << 30)
    with pytest.raises(ResourceError, match=r"round 7 could not .* of round 3; no other peer .* are lost") as raised:
        await leaving.leave()
    assert raised.value.exit_code == 5 and leaving.seen[-1].name == "last_checkpoint_failed"


@pytest.mark.parametrize(("other", "waits"), [("a", False), ("z", True)])
async def test_one_peer_of_several_waits(other: str, waits: bool, autojump_clock: MockClock) -> None:
    """The one with the least id, so that they do not leave it to each other."""
    leaving = Leaving(takes=2, others=(other,))
    assert bool(await leaving.leave()) is waits and leaving.tries == 1 + waits


async def test_a_peer_that_has_learned_nothing_waits_for_no_room() -> None:
    leaving = Leaving(takes=1 << 30)
    assert await leaving.leave(round=0) == [] and not leaving.tries
