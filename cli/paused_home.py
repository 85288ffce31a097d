"""The home of the peer that a person pauses or resumes on this machine."""

from __future__ import annotations

from pathlib import Path

from cli.homes import COORDINATOR, default_home
from peer.errors import ConfigError


def paused_file(home: Path | None) -> tuple[Path, bool]:
    """Return the file that pauses the peer of a home, and whether that runs. Raises ConfigError where it trains
    nothing."""
    from peer.identity import Identity
    from swarm.run.home import Home
    from swarm.run.manifest import Manifest, open_any_manifest
    from swarm.run.manifest_transfer import load_run_files

    found = Home(home or _only_home())
    if not found.identity.is_file():
        raise ConfigError(f"{found.path} is not the home of a peer: name one with --home")
    kept = load_run_files(found.path)
    if kept is not None:
        manifest = open_any_manifest(kept[0])
        coordinates = manifest.authority == Identity.load_or_create(found.identity).peer_id
        if coordinates or not isinstance(manifest, Manifest):
            what = "coordinates a run" if coordinates else "serves blocks"
            raise ConfigError(f"the peer of {found.path} {what} and does not train: stop it with Ctrl-C instead")
    return found.paused, found.is_in_use


def _only_home() -> Path:
    """Return the home of the one peer that runs from a default home; where none runs, that of the only one there is."""
    from swarm.run.home import Home

    folder = default_home("any").parent
    keys = folder.glob("*/identity.key")
    homes = sorted(key.parent for key in keys if not key.parent.name.startswith(COORDINATOR))
    running = [home for home in homes if Home(home).is_in_use]
    choice = running or homes
    if len(choice) != 1:
        what = f"{len(choice)} peers" if choice else "no peer"
        raise ConfigError(f"{what} found in {folder}: name the home of one with --home")
    return choice[0]
