"""The home of the peer that a person pauses or resumes on this machine."""

from __future__ import annotations

from pathlib import Path

from cli.options import default_home
from peer.errors import ConfigError


def paused_file(home: Path | None) -> tuple[Path, bool]:
    """Return the file that pauses the peer of a home, and whether that runs. Raises ConfigError."""
    from swarm.run.home import Home

    found = Home(home or _only_home())
    if not found.identity.is_file():
        raise ConfigError(f"{found.path} is not the home of a peer: name one with --home")
    return found.paused, found.is_in_use


def _only_home() -> Path:
    """Return the home of the one peer that runs from a default home; where none runs, that of the only one there is."""
    from swarm.run.home import Home

    folder = default_home("any").parent
    homes = sorted(path.parent for path in folder.glob("*/identity.key") if path.parent.name != "coordinator")
    running = [home for home in homes if Home(home).is_in_use]
    choice = running or homes
    if len(choice) != 1:
        what = f"{len(choice)} peers" if choice else "no peer"
        raise ConfigError(f"{what} found in {folder}: name the home of one with --home")
    return choice[0]
