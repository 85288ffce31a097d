"""A peer's folder on disk, and the lock that keeps two processes from being the same peer.

lock identity.key invite listening living choices.json served.json manifest.msgpack tokenizer.json guests.msgpack
addresses.json events.jsonl worker.log worker/ corpus/ pages/ pages.index agreement/ results/ fetched/ checkpoints/
state.part loss.png paused base/ At the coordinator also bans.msgpack, unbegun (before the first commit), replaced/ (a
run that never began), complete (of a gossip run), base.source, and regroup.request and regroup.answer while the
operator asks for a regroup

`agreement/` holds what this peer has promised to the other members of its group. It must never be put back from a
backup: delete it instead.

`worker/` is the only folder that the worker may write: token ids, temporary files, compiled kernels. `corpus/` is that
of the process that only tokenizes. `pages/` holds pages of the run's data set, and pages.index its index. `base/`
holds the parts of the base that an adapter is trained beside.

In a pipeline there is also `replica`, and the files of a stage (agreement/, results/, fetched/, checkpoints/,
state.part) lie in folders stage-0/, stage-1/ and so on. There proof.msgpack proves the commit of a backup, and
backup.part is a backup of that stage on its way.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.errors import ResourceError
from peer.files import write_atomically

_BEGUN: Final = {"lock", "identity.key", "manifest.msgpack"}
_REPLACED: Final = {
    "adapters", "addresses.json", "agreement", "backup.part", "base", "base.source", "checkpoints", "complete",
    "corpus", "fetched", "listening", "living", "loss.png", "pages", "pages.index", "replaced", "replica",
    "results", "state.part", "tokenizer.json", "worker",
}  # fmt: skip
"""The files that a peer writes or empties in its home. Not those that a user may put there before its first start."""


@dataclass(frozen=True)
class Home:
    """Paths under one peer's home."""

    path: Path

    def stage(self, stage: int, stages: int) -> Home:
        """Return the folder of one stage's files; this home if there is only one stage."""
        return self if stages == 1 else Home(self.path / f"stage-{stage}")

    @property
    def option(self) -> str:
        """The argument that names this home in a typed command, from any folder."""
        return f"--home {shlex.quote(os.path.abspath(self.path))}"

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
    def complete(self) -> Path:
        """At the coordinator of a gossip run: there once all its peers have made their last round."""
        return self.path / "complete"

    @property
    def unbegun(self) -> Path:
        """At the coordinator: there until a commit of the run is seen. Until then another RUN.toml may replace it."""
        return self.path / "unbegun"

    @property
    def choices(self) -> Path:
        """The options of the last start that the next one takes over, as the command wrote them."""
        return self.path / "choices.json"

    @property
    def served(self) -> Path:
        """As `choices`, of a peer that serves blocks: the same home may train as well."""
        return self.path / "served.json"

    @property
    def guests(self) -> Path:
        """The members that came by each invite, as far as this peer has met them."""
        return self.path / "guests.msgpack"

    @property
    def listening(self) -> Path:
        """The addresses at which this peer last listened, a line each, for the invites that it prints."""
        return self.path / "listening"

    def note_listening(self, addresses: Iterable[str]) -> None:
        """Write `listening`. Raises ResourceError."""
        write_atomically(self.listening, "".join(f"{address}\n" for address in addresses).encode())

    @property
    def paused(self) -> Path:
        """There while the owner has paused the peer (`swarm.run.owners_pause`)."""
        return self.path / "paused"

    @property
    def living(self) -> Path:
        """Addresses of members that were there when this peer last looked, a line each, for the invites it prints."""
        return self.path / "living"

    def note_living(self, addresses: Iterable[str]) -> None:
        """Write `living`. Raises ResourceError."""
        write_atomically(self.living, "".join(f"{address}\n" for address in addresses).encode())

    def living_addresses(self) -> tuple[str, ...]:
        """Return what `living` holds; nothing if it is missing or cannot be read."""
        with suppress(OSError, UnicodeDecodeError):
            return tuple(self.living.read_text().split())
        return ()

    @property
    def regroup_request(self) -> Path:
        """At the coordinator: the operator's request (`peer regroup`)."""
        return self.path / "regroup.request"

    @property
    def regroup_answer(self) -> Path:
        """The coordinator's answer to that."""
        return self.path / "regroup.answer"

    @property
    def agreement(self) -> Path:
        """The folder of this peer's records in the agreement of its group."""
        return self.path / "agreement"

    @property
    def proof(self) -> Path:
        """The proof of a backup's commit."""
        return self.path / "proof.msgpack"

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
    def pages(self) -> Path:
        """The cache of pages of the run's data set."""
        return self.path / "pages"

    @property
    def page_index(self) -> Path:
        """The index of that data set."""
        return self.path / "pages.index"

    @property
    def base(self) -> Path:
        """The parts of the run's base that were fetched or quantized."""
        return self.path / "base"

    @property
    def adapters(self) -> Path:
        """The adapters of a served model, a folder each."""
        return self.path / "adapters"

    @property
    def base_source(self) -> Path:
        """At the coordinator: the path of the base's checkpoint."""
        return self.path / "base.source"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def states(self) -> Path:
        """Where the files of states lie, if they are not in memory."""
        return self.path / "states"

    @property
    def state_part(self) -> Path:
        return self.path / "state.part"

    @property
    def is_in_use(self) -> bool:
        """Whether a process runs from this home."""
        try:
            fd = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def _check_own(self) -> None:
        """Raise ResourceError for a folder that no peer has begun, and where one would replace what is there."""
        with suppress(FileNotFoundError):
            names = set(os.listdir(self.path))
            if not names & _BEGUN and (taken := sorted(names & _REPLACED)):
                raise ResourceError(
                    f"{self.path} is no peer's and holds {taken[0]}, which one would replace: choose an empty folder"
                    " with --home"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home for this process. ResourceError if it cannot be written, is another user's, holds files of
        others where ours would go, or another process holds it."""
        try:
            self._check_own()
            self.path.mkdir(parents=True, exist_ok=True)
            owner = self.path.stat().st_uid
            if owner not in (os.geteuid(), 0):  # its owner could put links where files of ours go
                raise ResourceError(f"{self.path} is another user's: choose a folder of your own with --home")
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
