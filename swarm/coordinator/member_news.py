"""Reports of the members, summed up for the coordinator's screen and event log: it trains nothing itself.

These are claims, for display; no round depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Final

import trio
from msgspec.structs import replace

from peer.catalogue.groups import MembersTold, MemberUnsaved
from peer.events import EventLog
from swarm.membership.member_record import MemberRecord
from swarm.membership.membership import REFRESH_S, Membership
from swarm.rounds.group_driver import UNSAVED

TRAINING: Final = ("full", "stage")


async def tell_news(membership: Membership[MemberRecord], events: EventLog) -> None:
    """Tell of the members whenever their round or losses have changed, of a held-out loss once: records keep it until
    the next one is measured; and of each that begins to say that it cannot write its disk. Events: members_told,
    member_unsaved."""
    told: MembersTold | None = None
    stuck: dict[str, str] = {}
    while True:
        before, stuck = stuck, unsaved(membership.view)
        for peer in stuck.keys() - before.keys():
            events.emit(MemberUnsaved(peer=peer, name=membership.view[peer].name, reason=stuck[peer]))
        if fresh := news_since(told, news := summed_up(membership.view)):
            events.emit(fresh)
            told = news
        await trio.sleep(REFRESH_S)


def unsaved(view: Mapping[str, MemberRecord]) -> dict[str, str]:
    """Return what the members say that can promise nothing, as their disks take nothing."""
    return {peer: record.phase for peer, record in view.items() if record.phase.startswith(UNSAVED)}


def news_since(told: MembersTold | None, news: MembersTold | None) -> MembersTold | None:
    """Return the part of `news` not yet in `told`; None without any."""
    if news is None or told is None:
        return news
    if (news.round, news.loss, news.val_loss) == (told.round, told.loss, told.val_loss):
        return None
    return replace(news, val_loss=None) if news.val_loss == told.val_loss else news


def summed_up(view: Mapping[str, MemberRecord]) -> MembersTold | None:
    """Return the newest round that a peer that trains has finished, and of the peers at that round the mean loss and
    the lowest of the latest held-out losses; of all that train the steps and bytes. None before the first round."""
    records = [record for record in view.values() if record.role in TRAINING]
    newest = max((record.round for record in records), default=0)
    if newest < 1:
        return None
    there = [record for record in records if record.round == newest]
    losses = [record.loss for record in there if record.loss is not None]
    held_out = [(record.val_round, -record.val_loss) for record in there if record.val_loss is not None]
    val_round, val_loss = max(held_out, default=(-1, 0.0))
    return MembersTold(
        round=newest,
        loss=round(fmean(losses), 4) if losses else None,
        val_loss=round(-val_loss, 4) if held_out else None,
        val_round=val_round if val_round >= 0 else None,
        peers=len(records),
        steps_per_s=round(sum(record.speed for record in records), 2),
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
    )
