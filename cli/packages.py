"""A check that the five packages, whose names are common, are not shadowed by other packages."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from peer.errors import ConfigError

INSTALL_SERVER: Final = 'pip install starlette "hypercorn[trio]<0.19"'
"""Not this program with an extra: its name is in no package index, where another could take it."""
PACKAGES: Final = ("peer", "dht", "optim", "swarm", "cli")


def package_folder(name: str) -> Path | None:
    """Return the folder that a package would be imported from, without importing it; None if there is none."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.origin is None:  # a namespace package: a folder without __init__.py
        return next((Path(folder).resolve() for folder in spec.submodule_search_locations or ()), None)
    return Path(spec.origin).resolve().parent


def check_packages(names: Sequence[str] = PACKAGES) -> None:
    """Raise ConfigError unless all packages lie side by side in the folder that holds this one."""
    home = Path(__file__).resolve().parent.parent
    for name in names:
        found = package_folder(name)
        if found is None:
            raise ConfigError(f"the package {name} is missing from {home}: install barnraise again")
        if found != home / name:
            raise ConfigError(
                f"{found} shadows {home / name}: install barnraise in its own environment, and run it from a folder"
                " without a package of that name"
            )


def check_web_packages(command: str, *, metrics: bool) -> None:
    """Raise ConfigError unless the packages of the extra `serve`, or with `metrics` of `monitor`, are installed, which
    that command needs."""
    needed, install = "starlette and hypercorn", INSTALL_SERVER
    if metrics:
        needed, install = "starlette, hypercorn and prometheus-client", f"{INSTALL_SERVER} prometheus-client"
    try:
        for package in ("starlette", "hypercorn", *["prometheus_client"] * metrics):
            importlib.import_module(package)
    except ImportError:
        raise ConfigError(f"{command} needs {needed}: {install}") from None
