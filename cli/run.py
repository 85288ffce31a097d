"""The edge between our code and a terminal: the trio entry point, signals, and one sentence for every failure."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import click

from cli.terminal.lines import close_output, say, say_traceback
from cli.terminal.standard_streams import is_watched
from cli.terminal.usage import usage_sentence
from peer.errors import BarnraiseError, ResourceError

if TYPE_CHECKING:
    import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

INTERRUPTED = 130
BUG = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
T = TypeVar("T")


class Stopped(BaseException):
    """A clean stop that the user (SIGINT) or the system (SIGTERM, SIGHUP) asked for."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


def run_until_stopped(work: Callable[[], Awaitable[T]], tied: bool = False) -> T:
    """Run a trio function. The first SIGINT, SIGTERM or SIGHUP cancels it, so that it leaves and saves in its own
    `finally`; then Stopped is raised. A second SIGINT or SIGTERM ends the process at once. A further SIGHUP does
    nothing, also while the command ends after this: a terminal that is closed sends several. SIGTERM and SIGHUP are
    left alone where they are ignored, as by nohup.

    With `tied` the end of standard input counts as SIGTERM. A parent that holds the other end of that pipe thus ends
    its children however it dies.
    """
    import trio  # here: `peer --help` must stay fast

    caught: list[int] = []
    hang_ups = _taken(signal.SIGHUP)

    async def listen(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for signum in signals:
            if caught and signum == signal.SIGHUP:
                continue
            if caught:
                os._exit(128 + signum)
            caught.append(signum)
            say("", "Stopping cleanly; press Ctrl-C again to end at once.", err=True)
            scope.cancel()

    async def wait_for_parent(scope: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError):
            async for _ in trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())):
                pass
        caught.append(signal.SIGTERM)
        scope.cancel()

    async def supervise() -> T:
        with trio.open_signal_receiver(signal.SIGINT, *_taken(signal.SIGTERM), *hang_ups) as signals:
            if caught:
                raise Stopped(caught[0])
            async with trio.open_nursery() as listeners:
                scope = trio.CancelScope()
                listeners.start_soon(listen, signals, scope)
                if tied:
                    listeners.start_soon(wait_for_parent, scope)
                with scope:
                    result = await work()
                listeners.cancel_scope.cancel()
        if caught:
            raise Stopped(caught[0])
        return result

    gc.freeze()  # a full collection would stop the event loop for 150 ms to look through all imported modules
    gc.enable()
    found = [signal.signal(signum, lambda signum, frame: caught.append(signum)) for signum in hang_ups]
    try:
        return trio.run(supervise)
    finally:
        for signum, handler in zip(hang_ups, found, strict=True) if not caught else ():
            signal.signal(signum, handler)
        gc.unfreeze()


def _taken(*signums: signal.Signals) -> list[signal.Signals]:
    """Return those that are not ignored."""
    return [signum for signum in signums if signal.getsignal(signum) is not signal.SIG_IGN]


@contextmanager
def stopping_by_signal() -> Iterator[None]:
    """Raise on signals inside the block, for work without trio, so that `finally` is reached.

    SIGINT raises KeyboardInterrupt, even where a shell started the process with Ctrl-C ignored. SIGTERM and SIGHUP
    raise Stopped, unless they are ignored, as by nohup; SIGHUP does it once.
    """

    def stop(signum: int, frame: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise Stopped(signum)

    gc.enable()
    found = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in _taken(signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in found.items():
            signal.signal(signum, handler)


def end_unless_watched() -> None:
    """End a command that does nothing but show, once the terminal where it shows it has gone away."""
    if not is_watched():
        raise Stopped(signal.SIGHUP)


def report_failure(error: BaseException) -> int:
    """Print to standard error what ended the command; return the exit code. PEER_DEBUG=1 adds the traceback."""
    causes = list(leaves(error))
    chosen = _most_telling(causes)
    if isinstance(chosen, SystemExit):
        return chosen.code if isinstance(chosen.code, int) else 1
    if isinstance(chosen, click.exceptions.Exit):
        return chosen.exit_code
    if os.environ.get("PEER_DEBUG") == "1":
        with suppress(OSError):
            say_traceback(error)
    if isinstance(chosen, click.ClickException):
        _tell(f"peer: {usage_sentence(chosen)}")
        return chosen.exit_code
    if isinstance(chosen, Stopped):
        return chosen.exit_code
    if isinstance(chosen, (KeyboardInterrupt, click.Abort)):
        _tell("Interrupted.")
        return INTERRUPTED
    if isinstance(chosen, BrokenPipeError):
        close_output()
        return 0
    if isinstance(chosen, OSError) and chosen.errno in _FULL:
        _tell(f"peer: cannot write ({chosen.strerror}): free some space, or send the output elsewhere")
        close_output()
        return ResourceError.exit_code
    if isinstance(chosen, BarnraiseError):
        _tell(f"peer: {chosen}")
        return chosen.exit_code
    _tell(
        f"peer: a bug ended this command ({type(chosen).__name__}: {chosen}):"
        " run it again with PEER_DEBUG=1 and report what it prints"
    )
    return BUG


def _tell(line: str) -> None:
    with suppress(OSError):  # standard error leads nowhere either: the exit code tells it
        say(line, err=True)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside nested exception groups; `error` itself if it is not a group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def _most_telling(causes: list[BaseException]) -> BaseException:
    """Choose the error to report: a bug before a fault of the outside world before an interruption."""

    def rank(error: BaseException) -> int:
        if isinstance(error, (BarnraiseError, click.ClickException)):
            return 1
        return 0 if isinstance(error, Exception) else 2

    return min(causes, key=rank)
