"""A notification wakes all that wait for it, and none that come later."""

from __future__ import annotations

import trio
import trio.testing

from peer.notifier import Notifier


async def test_all_that_wait_are_woken_and_a_later_wait_is_not(autojump_clock: trio.testing.MockClock) -> None:
    changed, woken = Notifier(), list[bool]()

    async def wait() -> None:
        woken.append(await changed.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        changed.notify()
    assert woken == [True, True]
    assert not await changed.wait(5.0)
    assert trio.current_time() == 5.0
