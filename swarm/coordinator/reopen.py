"""From a home and a RUN.toml to the run: created, continued, or in place of one that never began.

The rules of a run never change. As long as no peer has committed there is nothing to keep, so another RUN.toml makes
another run in the same home, with the same key. `HOME/unbegun` says that no commit was seen; homes without it are of
runs that began. The run replaced last stays in `HOME/replaced`: members may have begun while the coordinator was away.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.catalogue.groups import RunReplaced
from peer.errors import ConfigError, ResourceError
from peer.events import EventLog
from peer.files import write_atomically
from peer.identity import Identity
from swarm.coordinator.create_run import CreatedRun, create_run, reload
from swarm.coordinator.data_set import with_data_set
from swarm.coordinator.run_progress import GroupStatus
from swarm.membership.bans import banned_in, extend_bans
from swarm.membership.member_record import MemberView
from swarm.membership.membership import REFRESH_S
from swarm.run.config import RunConfig
from swarm.run.home import Home
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import MANIFEST_FILE, TOKENIZER_FILE, load_run_files
from swarm.run.sections import AUTO_TOKENIZER
from swarm.run.tokenizer import read_tokenizer

_PEER_FILES: Final = ("invite", "living", "guests.msgpack", "addresses.json", "bans.msgpack", "complete", "loss.png")
_BASE: Final = ("base", "base.source")
_REQUESTS: Final = ("regroup.request", "regroup.answer")
_STAGE_FILES: Final = ("agreement", "results", "fetched", "checkpoints", "state.part")


def create_or_reopen(
    path: Path, run: RunConfig | None, identity: Identity, events: EventLog, data: Path | None = None
) -> CreatedRun:
    """Return the run of the home at `path`, created if there is none, or if it never began and RUN.toml is another.
    `data`: the folder of the data set that a new run trains on.

    Raises ConfigError, CheckpointError, ResourceError. Event: run_replaced.
    """
    kept, banned = load_run_files(path), frozenset[str]()
    if run is not None and (kept is None or data is not None):
        run = with_data_set(run, data)
    if kept is not None:
        run_files, tokenizer = kept
        manifest = open_manifest(run_files)
        if manifest.authority != identity.peer_id:
            raise ConfigError(f"{path} belongs to a run of another authority: choose another folder with --home")
        differs = "" if run is None else _difference(run, manifest, path)
        if not differs:
            return run_files, tokenizer, reload(path, manifest, identity, events)
        if not Home(path).unbegun.exists():
            raise ConfigError(differs)
        banned = banned_in(Home(path).bans, manifest)
        _set_aside(path)
        events.emit(RunReplaced(run_id=manifest.run_id, name=manifest.run.name))
    if run is None:
        raise ConfigError(f"{path} holds no run yet: give a RUN.toml (`peer coordinate --init` writes one)")
    created = create_run(path, run, identity, events)
    write_atomically(Home(path).unbegun, b"")
    if banned:
        extend_bans(Home(path).bans, identity, open_manifest(created[0]), banned)
    return created


async def watch_beginning(home: Home, groups: Iterable[GroupStatus], view: MemberView) -> None:
    """Remove `unbegun` once a group has committed or a member says that it has, so that the run stays what it is."""
    while home.unbegun.exists():
        rounds = [*(group.head.round for group in groups), *(record.round for record in view().values())]
        if max(rounds, default=0) > 0:
            home.unbegun.unlink(missing_ok=True)
        await trio.sleep(REFRESH_S / 2)


def _set_aside(path: Path) -> None:
    """Move the files of the run to `replaced`, the manifest last: a home without it holds no run."""
    aside = path / "replaced"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        stages = sorted(folder.name for folder in path.glob("stage-*"))
        for name in (
            *_PEER_FILES,
            *_REQUESTS,
            *_BASE,
            *_STAGE_FILES,
            *stages,
            TOKENIZER_FILE,
            MANIFEST_FILE,
            Home(path).unbegun.name,
        ):
            with suppress(FileNotFoundError):
                (path / name).rename(aside / name)
    except OSError as error:
        raise ResourceError(
            f"the run that never began cannot be moved to {aside} ({error.strerror}): check the folder's owner, or"
            " choose another with --home"
        ) from error


def _difference(run: RunConfig, manifest: Manifest, home: Path) -> str:
    """Return the sentence that says in what RUN.toml and the run in `home` differ; empty if in nothing."""
    if run.run.name != manifest.run.name:
        return f"{home} holds the run {manifest.run.name!r}: choose another folder with --home for a new one"
    sections = ["run", "data", "inner", "outer", "codec", "pipeline"]
    if run.pretrained is None:
        sections.insert(1, "model")
    if run.data.source == "pages" and run.data.pages is None:  # left to the folder of the data set
        run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, pages=manifest.data.pages))
    if run.data.end_of_text is None:  # left to the checkpoint, or to the data set
        data = msgspec.structs.replace(run.data, end_of_text=manifest.data.end_of_text)
        run = msgspec.structs.replace(run, data=data)
    differing = [f"[{name}]" for name in sections if getattr(run, name) != getattr(manifest, name)]
    if run.pretrained is not None and run.adapter != manifest.model.adapter:
        differing.append("[adapter]")
    if run.pretrained is None or run.tokenizer.source != AUTO_TOKENIZER:  # else the checkpoint may be gone
        with suppress(ConfigError, ResourceError):  # the run has a copy, so the file may be missing
            if read_tokenizer(run)[1] != manifest.tokenizer:
                differing.append("[tokenizer]")
    if not differing:
        return ""
    return (
        f"the run in {home} has another {', '.join(differing)} than RUN.toml, and the rules of a run that has begun"
        " never change: choose another folder with --home for a new one, or leave RUN.toml out to continue that one"
    )
