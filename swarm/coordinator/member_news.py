"""Reports of the members, summed up for the coordinator's screen and event log: it trains nothing itself.

These are claims, for display; no round depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Final

import trio

from peer.events import EventLog, Field
from swarm.membership.member_record import MemberRecord
from swarm.membership.membership import REFRESH_S, Membership
from swarm.rounds.group_driver import UNSAVED

TRAINING: Final = ("full", "stage")


async def tell_news(membership: Membership[MemberRecord], events: EventLog) -> None:
    """Tell of the members whenever their round or losses have changed, of a held-out loss once: records keep it until
    the next one is measured; and of each that begins to say that it cannot write its disk. Events: members_told,
    member_unsaved."""
    told: dict[str, Field] = {}
    stuck: dict[str, str] = {}
    while True:
        before, stuck = stuck, unsaved(membership.view)
        for peer in stuck.keys() - before.keys():
            events.emit("member_unsaved", peer=peer, name=membership.view[peer].name, reason=stuck[peer])
        if fresh := news_since(told, news := summed_up(membership.view)):
            events.emit("members_told", **fresh)
            told = news
        await trio.sleep(REFRESH_S)


def unsaved(view: Mapping[str, MemberRecord]) -> dict[str, str]:
    """Return what the members say that can promise nothing, as their disks take nothing."""
    return {peer: record.phase for peer, record in view.items() if record.phase.startswith(UNSAVED)}


def news_since(told: Mapping[str, Field], news: Mapping[str, Field]) -> dict[str, Field]:
    """Return the part of `news` not yet in `told`; may be empty."""
    if not news or all(news[name] == told.get(name) for name in ("round", "loss", "val_loss")):
        return {}
    return {**news, "val_loss": None} if news["val_loss"] == told.get("val_loss") else dict(news)


def summed_up(view: Mapping[str, MemberRecord]) -> dict[str, Field]:
    """Return the newest round that a peer that trains has finished, and of the peers at that round the mean loss and
    the lowest of the latest held-out losses; of all that train the steps and bytes. Empty before the first round."""
    records = [record for record in view.values() if record.role in TRAINING]
    newest = max((record.round for record in records), default=0)
    if newest < 1:
        return {}
    there = [record for record in records if record.round == newest]
    losses = [record.loss for record in there if record.loss is not None]
    held_out = [(record.val_round, -record.val_loss) for record in there if record.val_loss is not None]
    val_round, val_loss = max(held_out, default=(-1, 0.0))
    return {
        "round": newest,
        "loss": round(fmean(losses), 4) if losses else None,
        "val_loss": round(-val_loss, 4) if held_out else None,
        "val_round": val_round if val_round >= 0 else None,
        "peers": len(records),
        "steps_per_s": round(sum(record.speed for record in records), 2),
        "bytes_up": sum(record.bytes_up for record in records),
        "bytes_down": sum(record.bytes_down for record in records),
    }
