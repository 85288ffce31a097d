"""What the coordinator sums up of its members' records."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from peer.catalogue.groups import MembersTold
from peer.errors import ResourceError
from swarm.coordinator.member_news import news_since, summed_up, unsaved
from tests.swarm.coordinator.run_scene import open_run
from tests.swarm.membership.test_bans import record


def test_the_newest_round_is_summed_up_over_those_that_stand_there() -> None:
    at_four = msgspec.structs.replace(record("a"), role="full", round=4, speed=2.0, bytes_up=10, loss=2.0, val_loss=3.0)
    other = msgspec.structs.replace(at_four, loss=3.0, val_loss=2.5)
    behind = msgspec.structs.replace(at_four, round=3, loss=9.0, val_loss=1.0)
    coordinator = msgspec.structs.replace(at_four, role="coordinator", round=5, loss=None)
    news = summed_up({"a": at_four, "b": other, "c": behind, "d": coordinator})
    assert news is not None
    assert (news.round, news.loss, news.val_loss) == (4, 2.5, 2.5)
    assert news.val_round is None
    late, early = (msgspec.structs.replace(at_four, val_loss=loss, val_round=n) for loss, n in ((3.0, 4), (2.5, 2)))
    latest = summed_up({"a": late, "b": early})
    assert latest is not None and (latest.val_loss, latest.val_round) == (3.0, 4)
    assert (news.peers, news.steps_per_s, news.bytes_up) == (3, 6.0, 30)


def test_before_the_first_round_there_is_no_news_and_a_loss_may_be_missing() -> None:
    waiting = msgspec.structs.replace(record("a"), role="full", round=0, loss=None)
    assert summed_up({"a": waiting}) is None and summed_up({}) is None
    news = summed_up({"a": msgspec.structs.replace(waiting, round=1)})
    assert news is not None and news.loss is None


def test_who_cannot_write_its_disk_is_named() -> None:
    full = msgspec.structs.replace(record("a"), phase="cannot write its disk: No space left on device")
    assert unsaved({"a": full, "b": record("b")}) == {"a": full.phase}


def test_a_held_out_loss_is_told_once() -> None:
    news = MembersTold(round=4, loss=2.5, val_loss=2.6, peers=2, steps_per_s=1.0, bytes_up=0, bytes_down=0)
    assert news_since(None, news) == news and news_since(news, news) is None is news_since(news, None)
    later, better = msgspec.structs.replace(news, round=5), msgspec.structs.replace(news, val_loss=2.4)
    assert news_since(news, later) == msgspec.structs.replace(later, val_loss=None)
    assert news_since(news, better) == better


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"), [(errno.ENOSPC, os.strerror(errno.ENOSPC)), (errno.ENOENT, "its home was deleted")]
)
async def test_a_member_says_why_it_cannot_write_until_it_can(
    code: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]
    async with open_run(tmp_path, min_peers=1) as run:
        replica = await run.enter()
        records = replica.driver.group._records
        write = records.write

        def write_if_there_is_room(entries: Mapping[str, bytes]) -> None:
            if full[0]:
                raise ResourceError("cannot write /a/path") from OSError(code, os.strerror(code))
            write(entries)

        monkeypatch.setattr(records, "write", write_if_there_is_room)
        await run.until(lambda: replica.driver.phase == f"cannot write its disk: {why}")
        full[0] = False
        await run.until(lambda: not replica.driver.phase.startswith("cannot write"))
