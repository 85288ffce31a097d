"""A peer's folder on disk, and the lock that keeps two processes from being the same peer.

lock   identity.key   invite   listening   manifest.msgpack   tokenizer.json   guests.msgpack   regroup.msgpack
addresses.json   events.jsonl   worker.log   worker/   corpus/   checkpoints/   state.part
At the coordinator also bans.msgpack   seen.msgpack

`worker/` is the only folder that the worker may write: token ids, temporary files, compiled kernels. `corpus/` is that
of the process that only tokenizes.

In a pipeline there is also `replica`, and the files of a stage (regroup.msgpack, seen.msgpack, checkpoints/,
state.part) lie in folders stage-0/, stage-1/ and so on. There proof.msgpack proves the commit of a backup, and
backup.part is a backup of that stage on its way.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peer.errors import ResourceError


@dataclass(frozen=True)
class Home:
    """Paths under one peer's home."""

    path: Path

    def stage(self, stage: int, stages: int) -> Home:
        """Return the folder of one stage's files; this home if there is only one stage."""
        return self if stages == 1 else Home(self.path / f"stage-{stage}")

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def invite(self) -> Path:
        """The invite that this peer was started with; at the coordinator, the invite to its run."""
        return self.path / "invite"

    @property
    def bans(self) -> Path:
        """At the coordinator: the signed ban list."""
        return self.path / "bans.msgpack"

    @property
    def guests(self) -> Path:
        """The members that came by each invite, as far as this peer has met them."""
        return self.path / "guests.msgpack"

    @property
    def listening(self) -> Path:
        """The addresses at which this peer last listened, a line each, for the invites that it prints."""
        return self.path / "listening"

    @property
    def regroup(self) -> Path:
        return self.path / "regroup.msgpack"

    @property
    def regroup_before(self) -> Path:
        """The regroup of the last checkpoint's term, where that is another term."""
        return self.path / "regroup.before.msgpack"

    @property
    def proof(self) -> Path:
        """The proof of a backup's commit."""
        return self.path / "proof.msgpack"

    @property
    def agreement(self) -> Path:
        """The records of a replica's part in the agreement."""
        return self.path / "agreement"

    @property
    def seen(self) -> Path:
        """The last heads that a coordinator saw committed."""
        return self.path / "seen.msgpack"

    @property
    def replica(self) -> Path:
        """In a pipeline: the number of the stage of which this peer was last a replica."""
        return self.path / "replica"

    @property
    def addresses(self) -> Path:
        return self.path / "addresses.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def state_part(self) -> Path:
        return self.path / "state.part"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home for this process. ResourceError if it cannot be written or another process holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(
                f"cannot write to {self.path} ({error.strerror}): choose a folder of your own with --home"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ResourceError(
                f"another peer is running from {self.path}: stop it, or choose another folder with --home"
            ) from error
        try:
            yield
        finally:
            os.close(fd)
