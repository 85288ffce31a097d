"""Dialling a peer at all its known addresses, staggered, each with its own deadline.

The library tries one address per transport, remembers failures for a minute, and mixes all causes in one exception.
Here the addresses race as in RFC 8305, and the error says which address failed and why.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey

from peer.errors import DialError, DialReason
from peer.net.stream_channel import LOST

Connection = Any
"""A py-libp2p SwarmConn."""

_TELLING: Final[tuple[DialReason, ...]] = ("wrong_peer", "refused", "timeout", "unreachable")
_SENTENCES: Final[dict[DialReason, str]] = {
    "wrong_peer": "another peer answers there: the address is out of date, ask for a new invite",
    "refused": "nothing listens there, or it hangs up: check that the peer is running and its port is forwarded",
    "timeout": "no answer in time: check that the peer is up and that no firewall drops the packets",
    "unreachable": "there is no route to it: check this machine's network and the address",
}
_UNREACHABLE_ERRNOS: Final = frozenset(
    {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EACCES, errno.EPERM}
)


@dataclass
class Dial:
    """One attempt to reach a peer, shared by all callers."""

    done: trio.Event = field(default_factory=trio.Event)
    connection: Connection | None = None
    error: DialError | None = None


async def race(
    peer: str,
    addresses: Sequence[str],
    attempt: Callable[[str], Awaitable[Connection]],
    *,
    timeout_s: float,
    stagger_s: float,
    discard: Callable[[Connection], None],
) -> Connection:
    """Return the first connection that `attempt` makes to any address. Raises DialError if it makes none.

    The next address starts when the previous one has failed or `stagger_s` has passed. `discard` gets a connection that
    comes second, or that the caller does not get because it is cancelled.
    """
    if not addresses:
        raise DialError(f"no address of {peer} is known: wait until it announces itself", "unreachable")
    failures: dict[str, DialReason] = {}
    told: dict[DialReason, str] = {}
    winner: Connection | None = None

    try:
        async with trio.open_nursery() as nursery:

            async def try_one(address: str, failed: trio.Event) -> None:
                nonlocal winner
                with trio.move_on_after(timeout_s) as scope:
                    try:
                        connection = await attempt(address)
                    except DialError as error:  # its message is more precise than ours
                        failures[address] = error.reason
                        told.setdefault(error.reason, str(error))
                    except LOST as error:
                        failures[address] = classify(error)
                    else:
                        if winner is None:
                            winner = connection
                            nursery.cancel_scope.cancel()
                        else:
                            discard(connection)
                if scope.cancelled_caught:
                    failures[address] = "timeout"
                failed.set()

            for address in addresses:
                failed = trio.Event()
                nursery.start_soon(try_one, address, failed)
                with trio.move_on_after(stagger_s):
                    await failed.wait()
    except BaseException:
        if winner is not None:  # the caller is cancelled at the moment of success
            discard(winner)
        raise
    if winner is not None:
        return winner
    raise _dial_error(peer, failures, told)


def classify(error: BaseException) -> DialReason:
    """Return why a dial failed, from the exceptions chained below the library's."""
    reasons = {reason for cause in _causes(error) if (reason := _reason(cause)) is not None}
    return next((reason for reason in _TELLING if reason in reasons), "refused")  # the peer answered, then hung up


def _reason(error: BaseException) -> DialReason | None:
    if isinstance(error, PeerIDMismatchesPubkey):
        return "wrong_peer"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (TimeoutError, trio.TooSlowError)):
        return "timeout"
    if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _UNREACHABLE_ERRNOS):
        return "unreachable"
    return None


def _causes(error: BaseException, depth: int = 12) -> Iterator[BaseException]:
    yield error
    if depth == 0:
        return
    below = [error.__cause__ or error.__context__, *getattr(error, "exceptions", ())]
    for cause in below:
        if cause is not None:
            yield from _causes(cause, depth - 1)


def _dial_error(peer: str, failures: dict[str, DialReason], told: dict[DialReason, str]) -> DialError:
    worst = next(reason for reason in _TELLING if reason in failures.values())
    if worst in told:
        return DialError(told[worst], worst)
    places = ", ".join(address for address, reason in failures.items() if reason == worst)
    return DialError(f"cannot reach {peer} at {places}: {_SENTENCES[worst]}", worst)
