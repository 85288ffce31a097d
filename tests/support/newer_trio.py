"""What trio has and the stubs of trio_typing, which mypy takes before trio's own types, lack: they are older."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import trio

if TYPE_CHECKING:
    from trio_typing import TaskStatus
else:
    from trio import TaskStatus

__all__ = ["TaskStatus", "run_abandonable"]

T = TypeVar("T")


async def run_abandonable(call: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call in a thread that is left to itself when the caller is cancelled."""
    return await trio.to_thread.run_sync(call, *arguments, abandon_on_cancel=True)  # type: ignore[call-arg]
