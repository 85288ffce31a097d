"""Whom the members of a run judge by the loss (`swarm.protocol.loss_check`), as they say when they are asked.

Each member judges alone, and what it says is its word: nothing proves it. So it is shown who says so, and of how many
that answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from optim.config import DilocoConfig
from peer.net.method import Empty
from swarm.protocol.messages import JUDGED, JudgedPeers
from swarm.run.manifest import Manifest

if TYPE_CHECKING:
    from peer.net.host import Host

ASKED_MAX: Final = 64
POLL_S: Final = 3.0


class JudgedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A peer whose updates make the loss worse, as members of the last commit say."""

    peer: str
    judges: list[str]
    """The members that say so."""
    left_out_by: list[str]
    """Those of them that leave the peer out of the rounds that they lead."""


def has_judges(manifest: Manifest) -> bool:
    """Whether the run's members judge each other by the loss."""
    return isinstance(manifest.outer, DilocoConfig) and manifest.outer.check_by_loss > 0


async def ask_judged(host: Host, members: Iterable[str]) -> dict[str, JudgedPeers]:
    """Ask up to 64 members at once whom they judge; return what those say that answer, in seconds. Members with older
    software do not know the question."""
    from peer.net.rpc import ask_each  # with libp2p, which the structs of a state do not need

    asked = [peer for peer in dict.fromkeys(members) if peer != host.peer_id][:ASKED_MAX]
    return await ask_each(host.rpc, JUDGED, dict.fromkeys(asked, Empty()), POLL_S)


def judged_by(said: Mapping[str, JudgedPeers], known: Collection[str]) -> list[JudgedStatus]:
    """Return whom these members judge, first whom most do. They can name only `known` peers, and not themselves."""
    judges, left_out_by = dict[str, list[str]](), dict[str, list[str]]()
    for member, word in sorted(said.items()):
        for peer in {*word.suspects, *word.left_out}.intersection(known) - {member}:
            judges.setdefault(peer, []).append(member)
            if peer in word.left_out:
                left_out_by.setdefault(peer, []).append(member)
    found = [
        JudgedStatus(peer=peer, judges=says, left_out_by=left_out_by.get(peer, [])) for peer, says in judges.items()
    ]
    return sorted(found, key=lambda status: (-len(status.judges), -len(status.left_out_by), status.peer))
