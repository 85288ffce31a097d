"""The homes of peers on this machine: those in the default place, and others that an index names.

The index, `homes` in the default place, has a home a line, as JSON. It is a convenience: where it cannot be read or
written, its homes are not listed.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli.homes import default_home
from peer.errors import BarnraiseError, ConfigError
from peer.figures import quoted
from peer.files import read_bounded, write_atomically
from peer.plain_text import plain
from swarm.run.invite import Invite, read_saved_invite

INDEX: Final = "homes"
_PEER: Final = "peer"
_SHOWN_MAX: Final = 100
_INDEX_BYTES_MAX: Final = 1 << 20
_LISTED_MAX: Final = 200
"""Lines of the index, from which on those of homes that are gone are dropped."""


@dataclass(frozen=True)
class KnownHome:
    """A home, and the run or served model that it belongs to."""

    path: Path
    role: str
    """"coordinator", "peer" or "server"; empty for a home without a run, as a relay's."""
    name: str
    """The run's or model's; empty without one, and where the manifest cannot be read."""
    run_id: str
    is_running: bool


def note_home(home: Path) -> None:
    """Remember a home that is outside of the default place."""
    path, root = os.path.abspath(home), default_home("")
    if os.path.dirname(path) == os.path.abspath(root):
        return
    with suppress(OSError, BarnraiseError):
        noted = _noted()
        if path in noted:
            return
        if len(noted) >= _LISTED_MAX:
            noted = [one for one in noted if os.path.isdir(one)][-_LISTED_MAX:]
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / INDEX, "".join(f"{json.dumps(one)}\n" for one in [*noted, path]).encode())


def known_homes() -> list[KnownHome]:
    """Return all homes on this machine, sorted by path."""
    with suppress(OSError):
        root = default_home("")
        found = [str(path) for path in root.iterdir()] if root.is_dir() else []
        return [home for path in sorted({*found, *_noted()}) if (home := _home_at(Path(path))) is not None]
    return []


def homes_called(word: str) -> list[KnownHome]:
    """Return the homes of the run or served model of that name, and the home in a folder of that name."""
    return [home for home in known_homes() if word in (home.name, home.path.name) and home.run_id]


def invite_called(word: str) -> Invite:
    """Return the invite of the run or served model of that name on this machine. Raises ConfigError where there is
    none, or several."""
    found = homes_called(word)
    if not found:
        raise ConfigError(
            f"{plain(repr(word), _SHOWN_MAX)} is no invite, no file and no name that `peer ls` shows: copy the invite"
            " itself, or correct the path or name"
        )
    if len({home.run_id for home in found}) > 1:
        places = ", ".join(str(home.path) for home in found)
        raise ConfigError(f"{word!r} names runs of several homes ({places}): give the home itself")
    for home in sorted(found, key=lambda home: not home.is_running):
        with suppress(ConfigError):
            return read_saved_invite(home.path)
    raise ConfigError(f"the home {found[0].path} holds no invite: copy the invite itself")


def word_for(home: Path) -> str:
    """Return the shortest word, quoted for a shell, that means the invite in a home on this machine: the name that
    `peer ls` shows, unless that means another run too; else the home."""
    found = _home_at(home)
    if found is not None and found.name and not (found.name.startswith("-") or os.path.exists(found.name)):
        with suppress(ConfigError):
            if invite_called(found.name).run_id == found.run_id:
                return shlex.quote(plain(found.name))
    return quoted(home)


def home_meant(word: str) -> Path | None:
    """Return the home of a peer that trains which a word in the place of an invite names, as a folder or by name; None
    where it names none. Raises ConfigError where it names several."""
    if os.path.isdir(word):
        home = _home_at(Path(word))
        return home.path if home is not None and home.role == _PEER else None
    if os.path.isfile(word):
        return None
    found = [home.path for home in homes_called(word) if home.role == _PEER]
    if len(found) > 1:
        raise ConfigError(f"{word!r} names several homes ({', '.join(map(str, found))}): give one of them by --home")
    return found[0] if found else None


def _noted() -> list[str]:
    return list(dict.fromkeys(_lines(default_home(INDEX))))


def _lines(index: Path) -> Iterator[str]:
    try:
        content = read_bounded(index, _INDEX_BYTES_MAX)
    except OSError:
        return
    for line in content.splitlines():
        with suppress(ValueError):
            path = json.loads(line)
            if isinstance(path, str) and os.path.isabs(path) and "\0" not in path:
                yield path


def _home_at(path: Path) -> KnownHome | None:
    """Return the home in a folder; None if there is none."""
    from peer.identity import Identity
    from swarm.run.home import Home
    from swarm.run.manifest import Manifest
    from swarm.run.manifest_transfer import load_manifest

    home = Home(path)
    try:
        if not home.identity.is_file():
            return None
        manifest = load_manifest(path)
        own = Identity.load_or_create(home.identity).peer_id
    except (OSError, BarnraiseError):
        return KnownHome(path, _PEER, "", "", home.is_in_use)
    if manifest is None:
        return KnownHome(path, "", "", "", home.is_in_use)
    role = "server"
    if isinstance(manifest, Manifest) and manifest.authority == own:
        role = "coordinator"
    elif isinstance(manifest, Manifest) and home.choices.is_file():  # a server of the run's commits keeps none
        role = _PEER
    return KnownHome(path, role, manifest.name, manifest.run_id, home.is_in_use)
