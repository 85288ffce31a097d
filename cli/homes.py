"""Where a peer's home is when --home is left out, and what a home remembers of the last start from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from click.core import ParameterSource

from peer.decoding import MALFORMED, told
from peer.errors import BarnraiseError, ConfigError, ResourceError
from peer.files import read_bounded
from peer.net.reach import Reach
from swarm.run.home import Home
from swarm.run.invite import Invite, read_saved_invite

COORDINATOR: Final = "coordinator"
Choice = bool | int | float | str | tuple[str | int, ...]
_EACH_TIME: Final = ("invite", "home", "as_json", "tied")  # no choices for the next start
_HARDWARE: Final = ("device", "devices", "layout")  # one choice together
_NAME_CHARACTERS: Final = 40
_CHOICES_BYTES_MAX: Final = 1 << 16


def default_home(name: str) -> Path:
    """Return the default of --home. $BARNRAISE_HOME replaces ~/.barnraise. Raises ConfigError for an unknown ~user."""
    place = os.environ.get("BARNRAISE_HOME") or "~/.barnraise"
    try:
        return Path(place).expanduser() / name
    except RuntimeError as error:
        raise ConfigError(f"{place} names an unknown home directory: set HOME, or give --home") from error


def coordinator_home(run: str | None = None) -> Path:
    """Return the default home of the coordinator of the run with that name; None: of the only run that has one here.

    Runs of earlier releases are in `coordinator`. Raises ConfigError if there are several runs and none is named.
    """
    from swarm.run.manifest_transfer import MANIFEST_FILE

    earlier = default_home(COORDINATOR)
    if run is not None:
        named = "".join(letter if letter.isalnum() else "-" for letter in run[:_NAME_CHARACTERS])
        return earlier if _holds(earlier, run) else default_home(f"{COORDINATOR}-{named}")
    found = [earlier, *sorted(earlier.parent.glob(f"{COORDINATOR}-*"))]
    held = [home for home in found if os.path.exists(home / MANIFEST_FILE)]
    if len(held) > 1:
        raise ConfigError(f"several runs have their coordinator here ({', '.join(map(str, held))}): name one by --home")
    return held[0] if held else earlier


def _holds(home: Path, run: str) -> bool:
    """Whether the run in `home` has that name."""
    from swarm.run.manifest import open_manifest
    from swarm.run.manifest_transfer import load_run_files

    with suppress(BarnraiseError):
        kept = load_run_files(home)
        return kept is not None and open_manifest(kept[0]).run.name == run
    return False


def encoded(choices: Mapping[str, Any]) -> bytes:
    """Return what `Home.choices` holds: options by parameter name. Paths are absolute, so that it holds elsewhere."""
    plain = {
        name: os.path.abspath(value) if isinstance(value, Path) else value
        for name, value in choices.items()
        if value is not None
    }
    return msgspec.json.format(msgspec.json.encode(plain))


def choices_in(home: Path, serves: bool = False) -> dict[str, Choice]:
    """Return what `encoded` made of the choices of the last start from `home`, to train or to serve; empty if it has
    none."""
    path = Home(home).served if serves else Home(home).choices
    if not os.path.isdir(home):  # what is wrong with it is told by who opens it
        return {}
    try:
        return msgspec.json.decode(read_bounded(path, _CHOICES_BYTES_MAX), type=dict[str, Choice])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ResourceError(f"{path} cannot be read ({error.strerror}): check its owner and permissions") from error
    except MALFORMED as error:
        raise ConfigError(f"{path} is damaged ({told(error)}): delete it, and give the options again") from error


def taken_over(context: click.Context, home: Path, name: str) -> tuple[str, ...]:
    """Return the value of an option that may be given several times: as given now, else as at the last start."""
    given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    kept = None if given else choices_in(home).get(name)
    return tuple(map(str, kept)) if isinstance(kept, tuple) else tuple(context.params[name])


def chosen(context: click.Context, *without: str) -> bytes:
    """Return the options that were chosen, now or at an earlier start, as `Home.choices` holds them; not `without`."""
    made = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
    names = [name for name in context.params if name not in (*_EACH_TIME, *without)]
    return encoded({name: context.params[name] for name in names if context.get_parameter_source(name) in made})


def on_the_port_of(home: Path, reach: Reach) -> Reach:
    """Return `reach` listening at the port that this home's peer had last, where a single address leaves the port open.

    An announced address does not name a port of this machine.
    """
    if reach.announce or len(reach.listen) != 1 or not reach.listen[0].endswith("/tcp/0"):
        return reach
    port = last_port(home)
    return replace(reach, listen=(f"{reach.listen[0].removesuffix('0')}{port}",)) if port else reach


def last_port(home: Path) -> int | None:
    """Return the port of the first direct address at which this home's peer last listened."""
    with suppress(OSError, UnicodeDecodeError, ValueError):
        for address in Home(home).listening.read_text().split():
            parts = address.split("/")
            if "p2p-circuit" not in parts and parts[3:4] == ["tcp"]:
                return int(parts[4])
    return None


def on_a_free_port(home: Path, reach: Reach) -> Reach:
    """Return `on_the_port_of` if that port is free: other peers know it. Else what leaves it open."""
    from peer.net.listen_address import check_port_free

    again = on_the_port_of(home, reach)
    with suppress(ResourceError):
        for address in again.listen if again != reach else ():
            check_port_free(address)
        return again
    return reach


def resumed_invite(home: Path | None) -> Invite:
    """Return the invite by which the peer of `home` has joined. Raises ConfigError if it has not."""
    from peer.identity import Identity

    if home is None:
        raise click.UsageError("Give an INVITE, or the --home of a peer that has joined before.")
    invite, identity = read_saved_invite(home), Home(home).identity
    if os.path.exists(identity) and Identity.load_or_create(identity).peer_id == invite.authority:
        raise ConfigError(
            f"{home} is the coordinator's home: take another for the peer that trains, and give it INVITE"
        )
    return invite


class ResumingCommand(click.Command):
    """A command whose options are those of the last start from --home where it is given without INVITE."""

    serves = False
    """Whether it serves blocks and does not train: a home has one memory for each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = values.get("invite")  # click has a value of its own for what is not there
        if isinstance(home := values.get("home"), str) and not (isinstance(words, (list, tuple)) and words):
            replaced = _HARDWARE if any(isinstance(values.get(name), str) for name in _HARDWARE) else ()
            ctx.default_map = {
                name: value for name, value in choices_in(Path(home), self.serves).items() if name not in replaced
            }
        return super().parse_args(ctx, args)


class ResumingServer(ResumingCommand):
    """As its base, of blocks that are served."""

    serves = True
