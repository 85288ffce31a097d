"""The operator's request to a running coordinator (`peer regroup`), and its answer: two files in its home.

They need no port and no secret: a user who may write there may also read the run's key. This half needs no torch.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from peer.decoding import MALFORMED
from peer.errors import ConfigError, ResourceError
from peer.files import read_bounded, write_atomically
from peer.identity import Identity
from swarm.run.home import Home
from swarm.run.manifest import open_any_manifest
from swarm.run.manifest_transfer import load_run_files

FILE_BYTES_MAX: Final = 1 << 20
LOOK_EVERY_S: Final = 0.2
ANSWER_S: Final = 120.0  # a pipeline's groups are asked together, and each needs some seconds

Outcome = Literal["resumed", "begun", "withdrawn", "would_undo", "failed", "silent", "unnamed", "unbegun"]
Read = TypeVar("Read")


class RegroupRequest(msgspec.Struct, frozen=True):
    """The operator's wish for new terms of all groups."""

    nonce: str
    without: tuple[str, ...] = ()
    """Peers that must not be members of the new term and those that follow."""
    readmit: tuple[str, ...] = ()
    """Peers of earlier requests that may be members again."""
    undo: bool = False
    """Whether rounds may be undone whose state no peer can bring."""


class GroupOutcome(msgspec.Struct, frozen=True):
    """The outcome in one group."""

    outcome: Outcome
    """`begun`: its first term has begun meanwhile. `withdrawn`: the group continues by itself. `would_undo`: nothing
    was done, since rounds would be undone. `silent`: no peer has answered that holds a state. `unnamed`: nothing was
    done, since members do not answer that the operator has not named. `unbegun`: too few peers to begin."""
    stage: int | None
    round: int
    """The last committed one; of a new term, the one from which it continues."""
    term: int = 0
    members: int = 0
    reason: str = ""
    away: tuple[str, ...] = ()
    """The members that do not answer, and must be named."""
    alone: bool = False
    """Whether no member answers."""
    connected: int = 0
    """How many peers of the group are connected, members or not."""
    undone: int = 0
    """How many rounds would be undone."""
    branches: tuple[str, ...] = ()
    """The rounds from which the group could continue, the furthest first, if more than one."""
    needed: int = 0
    """With how many peers, of all its groups, the run begins."""
    restored: bool = False
    """Whether a group that has not begun waits for the operator's word."""


class RegroupAnswer(msgspec.Struct, frozen=True):
    """The answer to the request of that nonce."""

    nonce: str
    groups: tuple[GroupOutcome, ...]


def ask_coordinator(
    folder: Path, without: tuple[str, ...] = (), readmit: tuple[str, ...] = (), undo: bool = False
) -> tuple[GroupOutcome, ...]:
    """Ask the coordinator that runs from this home, and wait for its answer. Raises ConfigError if none runs there,
    ResourceError if the folder cannot be written or no answer comes."""
    home, nonce = Home(folder), secrets.token_hex(8)
    kept = load_run_files(folder)
    if kept is None or open_any_manifest(kept[0]).authority != Identity.load_or_create(home.identity).peer_id:
        raise ConfigError(f"{folder} is not the home of a coordinator: name the one that it runs from with --home")
    _check_runs(home)
    write_atomically(home.regroup_request, msgspec.json.encode(RegroupRequest(nonce, without, readmit, undo)))
    until = time.monotonic() + ANSWER_S
    try:
        while time.monotonic() < until:
            answer = read_file(home.regroup_answer, RegroupAnswer)
            if answer is not None and answer.nonce == nonce:
                return answer.groups
            _check_runs(home)
            time.sleep(LOOK_EVERY_S)
    finally:
        home.regroup_request.unlink(missing_ok=True)
        home.regroup_answer.unlink(missing_ok=True)
    raise ResourceError(f"the coordinator of {folder} does not answer: look into {home.events}, or start it again")


def read_file(path: Path, type_: type[Read]) -> Read | None:
    """Return what a file holds; None if there is none, or it holds something else."""
    try:
        return msgspec.json.decode(read_bounded(path, FILE_BYTES_MAX), type=type_)
    except (OSError, *MALFORMED):
        return None


def _check_runs(home: Home) -> None:
    if not home.is_in_use:
        raise ConfigError(f"no coordinator runs from {home.path}: start it with `peer coordinate {home.option}`")
