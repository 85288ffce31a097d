"""The folder of a data set while it is built, and after.

    .build/lock  plan  note  tokenizer.json  worker/{journal,buckets/...}   until the build is done
    train-00000.pages ...                                                  from the second pass on
    tokenizer.json  index.msgpack                                          once it is done
    .built                                                                 the plan's hash

A folder with an index.msgpack is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from peer.bounds import HASH_BYTES
from peer.data.building.packing import PAGES_FILE, PackingNote
from peer.data.building.plan import BuildPlan, read_note, replace_file, unwritable_out, write_note
from peer.data.pages.folder import INDEX, TOKENIZER
from peer.errors import ConfigError, ResourceError
from peer.files import read_bounded

Start = Literal["new", "continued", "over", "built"]
"""How a build begins: in an empty folder, where an earlier one ended, again in place of another, or not at all."""
_WORK: Final = ".build"
_BUILT: Final = ".built"


class OutFolder:
    """The folder that a build writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work: Final = path / _WORK
        self.private: Final = self.work / "worker"
        """The worker's own folder."""
        self.plan: Final = self.work / "plan"
        self.tokenizer: Final = self.work / TOKENIZER
        self.note: Final = self.work / "note"
        self.log: Final = self.work / "worker.log"

    @contextmanager
    def locked(self, plan: BuildPlan, tokenizer: bytes) -> Iterator[Start]:
        """Prepare the folder for a plan, and keep other builds out of it inside the block. Raises ConfigError if it
        holds other files, ResourceError if it cannot be written."""
        if self._is_built(plan):
            yield "built"
            return
        self._check_files()
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unwritable_out(self.path, error) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ResourceError(
                    f"another `peer data build` writes {self.path}: wait for it, or choose another folder with --out"
                ) from None
            try:
                start = self._prepared(plan, tokenizer)
            except OSError as error:
                raise unwritable_out(Path(str(error.filename or self.path)), error) from error
            yield start
        finally:
            os.close(fd)

    def finish(self, plan: BuildPlan) -> None:
        """Remove what only the build needs. Raises OSError."""
        replace_file(self.path / _BUILT, plan.digest)
        shutil.rmtree(self.work)

    def packing(self, plan: BuildPlan) -> PackingNote | None:
        """Return how far the second pass of a plan is; None before it."""
        note = read_note(self.note, PackingNote)
        return note if note is not None and note.plan == plan.digest else None

    def _is_built(self, plan: BuildPlan) -> bool:
        if not (self.path / INDEX).exists():
            return False
        note = read_note(self.plan, BuildPlan)  # a build that was killed at its very end
        with_plan = note is not None and note.digest == plan.digest
        try:
            if with_plan:
                self.finish(plan)
            same = read_bounded(self.path / _BUILT, HASH_BYTES) == plan.digest
        except OSError:
            same = False
        if not same:
            raise ConfigError(
                f"{self.path} holds a data set of other files or options: choose another folder with --out, or delete"
                " it"
            )
        return True

    def _check_files(self) -> None:
        try:
            names = os.listdir(self.path) if self.path.exists() else []
        except OSError as error:
            raise ResourceError(f"{self.path} cannot be read ({error.strerror}): choose another with --out") from error
        own = {_WORK, TOKENIZER} if _WORK in names else set()
        others = sorted(name for name in names if name not in own and not (own and PAGES_FILE.fullmatch(name)))
        if others:
            raise ConfigError(
                f"{self.path} holds other files, such as {others[0]!a}: choose a new or empty folder with --out"
            )

    def _prepared(self, plan: BuildPlan, tokenizer: bytes) -> Start:
        found = read_note(self.plan, BuildPlan)
        if found is not None and found.digest == plan.digest:
            return "continued"
        was_there = self.plan.exists()
        for path in self.path.iterdir():
            if path.name != _WORK:
                path.unlink()
        for path in self.work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        self.private.mkdir()
        if tokenizer:
            replace_file(self.tokenizer, tokenizer)
        write_note(self.plan, plan)
        return "over" if was_there else "new"
