"""A checkpoint on this machine, for the commands that use a served model: `--model DIR` in place of an INVITE.

A child process serves all of its blocks at a loopback address, as `peer serve` does, and ends with this one. So there
is one way to an answer, wherever the weights are, and this process loads no tensor library. Nothing leaves the machine.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from cli.combinations import check_one_source, refuse_beside, refuse_without
from cli.demo.child_processes import ChildPeer, children
from cli.demo.cluster import LOOPBACK
from cli.options import checkpoint_folder, dtype_option, quantize_option, read_invite, served_config, threads_option
from cli.run import leaves, stopping_by_signal
from cli.terminal.lines import is_terminal, say
from peer.catalogue.machine import WorkerDied, WorkerReady
from peer.catalogue.serving import BlocksServed
from peer.errors import BarnraiseError, CheckpointError, ConfigError, NetworkError, ResourceError, WorkerError
from peer.files import temporary_folder
from swarm.run.home import Home
from swarm.run.invite import Invite, read_saved_invite

if TYPE_CHECKING:
    from peer.config import HiddenType, Quantization
    from swarm.inference.client_view import Patience

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

Command = TypeVar("Command", bound=Callable[..., Any])
START_S: Final = 600.0  # a large checkpoint is hashed and read from a slow disk
POLL_S: Final = 0.05
WIRED_S: Final = 60.0
"""From a new worker's readiness until a client continues its answer there, on a slow machine."""
_ERRORS: Final[dict[int, type[BarnraiseError]]] = {2: ConfigError, 5: ResourceError, 6: CheckpointError}
_OURS: Final = "peer: "


class _Server:
    """The child that serves a checkpoint, and what it tells of its worker."""

    def __init__(self, child: ChildPeer) -> None:
        self.child = child
        self.serves = False
        """Whether it has begun to."""
        self.losses: list[str] = []
        """Why it has lost a worker, each time."""
        self._back_at = 0.0  # when the last worker was ready that has replaced another one; inf before

    def look(self) -> None:
        """Take what it has told since the last look."""
        for _, event in self.child.events.heard():
            self.serves |= isinstance(event, BlocksServed)
            if isinstance(event, WorkerDied):
                self.losses.append(event.cause)
                self._back_at = math.inf
            elif isinstance(event, WorkerReady) and self.losses:
                self._back_at = time.monotonic()

    def comes_back(self) -> bool:
        """Whether it replaces its worker, or has just done so."""
        self.look()
        return self.child.alive and time.monotonic() < self._back_at + WIRED_S


@dataclass(frozen=True)
class NamedModel:
    """The served model that a command uses."""

    invite: Invite
    server: _Server | None = None
    """Of a checkpoint on this machine."""
    adapter: str = ""
    """The name of its adapter that is asked for; empty for none."""

    def with_adapter(self, name: str | None) -> NamedModel:
        """Return the model with the adapter of that name; None for none."""
        return replace(self, adapter=name or "")

    def patience(self, wait_s: float | None = None, tell: Callable[[str], None] | None = None) -> Patience:
        """Return how long answers wait for servers that are missing: `wait_s`, reported by `tell` (None: hardly any).
        Of a checkpoint on this machine: as long as its server takes to start a new worker."""
        from swarm.inference.client_view import Patience

        if self.server is not None:
            return Patience(0.0, comes_back=self.server.comes_back)
        return Patience() if wait_s is None or tell is None else Patience(wait_s, tell)


def local_model_options(function: Command) -> Command:
    """Add --model, and the options that count with it only. --wire and --wait do not."""

    @wraps(function)
    def checked(**values: Any) -> Any:
        local = values["model"] is not None
        refuse_without("--model", local, "dtype", "quantize", "device", "threads")
        alone = "all of the model is computed by one process of this machine"
        beside = [name for name in ("wire", "wait") if name in values]
        refuse_beside("--model", local, *beside, why=alone)
        if "adapter" in values:
            refuse_beside("--model", local, "adapter", why="peer serve --model DIR --adapter NAME=DIR serves adapters")
        return function(**values)

    options = (
        threads_option("With --model: CPU threads."),
        quantize_option("With --model: hold its blocks in 8 or 4 bits.  [default: as the checkpoint is]"),
        dtype_option("With --model: what it is computed in.  [default: the checkpoint's own type]"),
        click.option("--device", default="auto", show_default=True, help="With --model: auto, cpu, cuda, cuda:1, mps."),
        click.option(
            "--model",
            metavar="DIR|HF_ID",
            help="Instead of INVITE: a checkpoint in the Hugging Face layout on this machine, computed here.",
        ),
    )
    wrapped = cast("Command", checked)
    for option in options:
        wrapped = option(wrapped)
    return wrapped


@contextmanager
def invite_to(
    invite: str | None,
    model: str | None,
    dtype: HiddenType | None,
    quantize: Quantization | None,
    device: str,
    threads: int | None,
) -> Iterator[NamedModel]:
    """Yield the served model that INVITE or --model names; one of --model is served inside the block.

    Raises ConfigError unless exactly one is given, and what keeps the checkpoint from being served."""
    if (invite is None) == (model is None):
        check_one_source("model", "invite", "model")
    if invite is not None:
        yield NamedModel(read_invite(invite))
        return
    assert model is not None
    folder = checkpoint_folder(model)
    blocks = f"0:{served_config(folder)[0].layers}"
    with temporary_folder("barnraise-model-") as place, children() as group:
        options = ["--blocks", blocks, "--name", "this machine", "--device", device, *LOOPBACK]
        options += [] if threads is None else ["--threads", str(threads)]
        options += [] if dtype is None else ["--dtype", dtype]
        options += [] if quantize is None else ["--quantize", quantize]
        if is_terminal():
            say(f"Loading {folder} ...", err=True)
        with stopping_by_signal():  # the folder goes and the child ends also if this is stopped while it loads
            command = ["serve", "--model", str(folder), *options]
            server = _Server(group.start("server", place / "server", command, threads or 0))
            _wait_serving(server)
        try:
            yield NamedModel(read_saved_invite(Home(server.child.home).path), server)
        except (NetworkError, BaseExceptionGroup) as error:
            ended = _ended(server) if all(isinstance(leaf, NetworkError) for leaf in leaves(error)) else None
            if ended is None:
                raise
            raise ended from error


def _wait_serving(server: _Server) -> None:
    """Wait until the child serves. Raises what ended it."""
    deadline = time.monotonic() + START_S
    while not server.serves:
        if not server.child.alive:
            reason = _said(server.child) or "it ended: run it again with PEER_DEBUG=1"
            raise _ERRORS.get(server.child.process.returncode, WorkerError)(reason)
        if time.monotonic() > deadline:
            raise WorkerError(f"the model is not loaded after {START_S:.0f} s: try a smaller one, or a faster disk")
        time.sleep(POLL_S)
        server.look()


def _ended(server: _Server) -> WorkerError | None:
    """Return the error if the child has ended under an answer: no network was lost then."""
    server.look()
    child, causes = server.child, server.losses
    if child.alive:
        return None
    code = child.process.returncode or 0
    ending = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    cause = causes[-1].partition(" (")[0] if causes else _said(child) or ending  # the bracket advises on training
    return WorkerError(f"the process that computes the model has ended ({cause}): run the command again")


def _said(server: ChildPeer) -> str:
    """Return the last error of the child; empty if it has told none."""
    said = [line for line in server.log_tail(8).split(" | ") if line.startswith(_OURS)]
    return said[-1].removeprefix(_OURS) if said else ""
