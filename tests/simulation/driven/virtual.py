"""What makes a run of the driver repeat itself: a virtual clock, trio's tasks in a seeded order, threads that are none.

With PYTHONHASHSEED=0 the same seed gives the same run in another process, too; in one process it always does."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import trio
from trio.testing import MockClock

from optim.strategies import dense
from peer.identity import Signed
from swarm.protocol import round_schedule, signer
from swarm.rounds import group_driver
from swarm.rounds.exchange import audits
from swarm.rounds.trainers import contribution
from swarm.state import leases, upload_limits
from tests.simulation.signatures import Signatures

THREAD_S = 0.001
SLICE_VALUES = 128  # so that small vectors have several slices
BUNDLES_MAX = 2  # so that these few, where a setup commits to bundles, have two slices each
Result = TypeVar("Result")
_run = import_module("trio._core._run")  # by name: the stubs of trio_typing lack it


@contextmanager
def repeatable(seed: str, signatures: Signatures, disk_s: Callable[[Any], float]) -> Iterator[None]:
    """Run trio under these inside the block. `disk_s(owner)`: how long work of a method's owner takes in its thread."""
    draws = random.Random(seed)

    async def run_sync(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        await trio.sleep(THREAD_S * draws.random() + disk_s(getattr(function, "__self__", None)))
        return function(*args)

    def sign(identity: Any, kind: str, body: Any) -> Signed:
        return signatures.of(identity.peer_id).sign(kind, body)

    clock = SimpleNamespace(**{**vars(time), "monotonic": virtual_time})
    chance = SimpleNamespace(
        **{**vars(secrets), "token_hex": lambda n: draws.randbytes(n).hex(), "token_bytes": draws.randbytes}
    )
    with ExitStack() as stack:
        stack.enter_context(patch.object(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        stack.enter_context(patch.object(trio.to_thread, "run_sync", run_sync))
        stack.enter_context(patch.object(dense, "SLICE_VALUES_MIN", SLICE_VALUES))
        stack.enter_context(patch.object(round_schedule, "BUNDLES_MAX", BUNDLES_MAX))
        for module in (leases, upload_limits):
            stack.enter_context(patch.object(module, "time", clock))
        stack.enter_context(patch.object(group_driver, "secrets", chance))
        for module in (signer, contribution, audits):
            stack.enter_context(patch.object(module, "sign_body", sign))
        stack.enter_context(patch.object(signer, "open_body", signatures.open))
        _run._r.seed(seed)
        yield


def virtual_time() -> float:
    """Return trio's time, 0 after its end: a snapshot's reader may go only then."""
    try:
        return trio.current_time()
    except RuntimeError:
        return 0.0


def run_virtually(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on a clock that jumps to whatever is due next."""
    trio.run(main, clock=MockClock(autojump_threshold=0.0))
