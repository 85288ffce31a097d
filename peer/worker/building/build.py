"""A build from its files to its index: both passes, and what a user hears of them."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from peer.data.building.gathering import BUCKETS, GatheredText
from peer.data.building.out_folder import OutFolder, Start
from peer.data.building.packing import Packing, PackingNote
from peer.data.building.plan import BuildPlan, PlannedFile, planned, unwritable_out, write_note
from peer.data.folder_files import TOOL_FOLDERS, TextSource, find_files
from peer.data.pages.folder import TOKENIZER, BuiltPages
from peer.data.pages.index import PageIndex
from peer.data.text_files import TEXT_SUFFIXES, Texts
from peer.data.tokenizer import BYTES
from peer.errors import ConfigError
from peer.ipc.build_messages import LoadBuild
from peer.worker.building.client import gather_apart


class BuildWatch(Protocol):
    """Takes how far a build is. Its methods are called from several threads, one at a time."""

    def began(self, start: Start) -> None:
        """Take how it begins."""
        ...

    def reading(self, done_bytes: int, of_bytes: int) -> None:
        """Take the bytes of files that are behind in the first pass."""
        ...

    def packing(self, done_bytes: int, of_bytes: int) -> None:
        """Take the bytes of buckets that are behind in the second pass."""
        ...


@dataclass(frozen=True)
class FoundText:
    """The files of a build, and the others by kind."""

    files: list[PlannedFile]
    skipped: Counter[str]
    roots: tuple[Path, ...]
    """What the user has named."""


@dataclass(frozen=True)
class DataBuild:
    """What is to be built: a plan, and what it does not name."""

    plan: BuildPlan
    roots: tuple[Path, ...]
    tokenizer: bytes
    """The tokenizer.json; empty for bytes."""
    out: Path
    is_strict: bool = False


@dataclass(frozen=True)
class BuildResult:
    """The outcome of a build."""

    index: PageIndex
    is_new: bool
    """Whether this command has finished it."""
    gathered: GatheredText = field(default_factory=GatheredText)


def find_text(roots: Sequence[Path]) -> FoundText:
    """Return the text files of folders, and files that were named. One with two names counts once. Raises ConfigError
    for a name that leads nowhere."""
    files, skipped, seen = list[PlannedFile](), Counter[str](), set[tuple[int, int]]()
    for root in roots:
        try:
            str(root).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the name {str(root)!a} is not UTF-8: rename it or name a link to it") from error
        if not os.path.exists(root):
            raise ConfigError(
                f"{root} does not exist: name files and folders of text, or a data set ORG/NAME of the Hub"
            )
        source = TextSource(root, TEXT_SUFFIXES, TOOL_FOLDERS, is_users=True)
        for file in sorted(find_files(source, skipped), key=lambda file: file.key):
            if file.identity in seen:
                skipped["under a second name"] += 1
                continue
            seen.add(file.identity)
            try:
                files.append(planned(file))
            except OSError:
                skipped["unreadable"] += 1
    return FoundText(files, skipped, tuple(roots))


async def run_build(build: DataBuild, watch: BuildWatch) -> BuildResult:
    """Build a data set, or continue where an earlier build has ended. Raises ConfigError, ResourceError,
    CheckpointError, WorkerError."""
    plan, out = build.plan, OutFolder(build.out.absolute())
    _check_place(build, out)
    with out.locked(plan, build.tokenizer) as start:
        watch.began(start)
        if start == "built":
            return BuildResult(BuiltPages.open(out.path).index, is_new=False)
        note = out.packing(plan) or await _gathered(build, out, watch)
        packing = Packing(plan, out.private / BUCKETS, out.path, out.note, note, watch.packing)
        index = await trio.to_thread.run_sync(_packed, build, out, packing, abandon_on_cancel=True)  # type: ignore[call-arg]
        return BuildResult(index, is_new=True, gathered=note.gathered)


async def _gathered(build: DataBuild, out: OutFolder, watch: BuildWatch) -> PackingNote:
    """Run the first pass, and note that it is done."""
    plan, total = build.plan, build.plan.size_bytes
    load = LoadBuild(
        plan=str(out.plan),
        tokenizer=str(out.tokenizer) if build.tokenizer else BYTES,
        readable=tuple(str(root.absolute()) for root in build.roots),
        directory=str(out.private),
    )
    found = await gather_apart(load, out.log, build.is_strict, lambda done: watch.reading(min(done, total), total))
    if not found.documents:
        raise ConfigError(no_documents(build, found))
    if len(found.sizes) != plan.buckets:
        raise ConfigError(f"the build names {len(found.sizes)} buckets of {plan.buckets}: delete {out.path}")
    note = PackingNote(plan=plan.digest, gathered=found)
    try:
        write_note(out.note, note)
    except OSError as error:
        raise unwritable_out(out.note, error) from error
    return note


def _packed(build: DataBuild, out: OutFolder, packing: Packing) -> PageIndex:
    try:
        if build.tokenizer:
            shutil.copyfile(out.tokenizer, out.path / TOKENIZER)
        index = packing.run()
        out.finish(build.plan)
    except OSError as error:
        raise unwritable_out(Path(str(error.filename or out.path)), error) from error
    return index


def _check_place(build: DataBuild, out: OutFolder) -> None:
    """Raise ConfigError if the data set would lie among the texts: the next build would read its files."""
    for root in build.roots:
        if out.path.resolve().is_relative_to(root.resolve()):
            raise ConfigError(f"{build.out} lies in {root}, which is read: choose a folder elsewhere")


def no_documents(build: DataBuild, found: GatheredText) -> str:
    """Return why there is nothing to build from, with the remedy."""
    names = ", ".join(str(root) for root in build.roots[:3]) + (", ..." if len(build.roots) > 3 else "")
    skipped = Texts(skipped=Counter(found.skipped)).skipped_text()
    remedy = f"name files with one of the suffixes {' '.join(sorted(TEXT_SUFFIXES))}, also with .gz or .zst"
    if build.plan.is_chat and not found.has_field:
        return (
            f"no JSON or .parquet file in {names} has messages in a field {build.plan.field!r} (skipped {skipped}):"
            ' write each conversation on a line as {"messages": [{"role": "user", "content": "..."}, ...]}, or name'
            " their field with `peer data build --text-field`"
        )
    if found.other_fields and not found.has_field:
        fields = ", ".join(map(repr, found.other_fields))
        return (
            f"no JSON or .parquet file in {names} has text in a field {build.plan.field!r} (skipped"
            f" {skipped}): give --text-field one of {fields}"
        )
    return f"{names} holds no text (skipped {skipped}): {remedy}"
