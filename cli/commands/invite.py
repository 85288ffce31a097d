"""`peer invite`: print an invite to a run, from any home that may invite.

Such are the home of its coordinator, and those of members that may invite.
"""

from __future__ import annotations

from pathlib import Path

import click

from cli.combinations import refuse, refuse_beside
from cli.homes import coordinator_home
from cli.options import count_option, home_option
from cli.terminal.lines import say
from peer.errors import ConfigError
from swarm.run.credentials import GUESTS_DEFAULT, GUESTS_MAX, INVITE_DAYS

_DAYS_MAX = 3650


@click.command()
@home_option("Home of the coordinator or of a member of the run.  [default: the only one of this machine]")
@click.option(
    "--for",
    "guest",
    metavar="PEER_ID",
    help="Make it out to this peer alone (`peer doctor --home DIR` shows its id). Only the coordinator can.",
)
@count_option("--guests", 1, GUESTS_MAX, GUESTS_DEFAULT, "How many peers it may bring into a closed run.")
@count_option("--days", 1, _DAYS_MAX, INVITE_DAYS, "How long it is valid.")
def invite(home: Path | None, guest: str | None, guests: int, days: int) -> None:
    """Print a new invite to the run of --home. It needs no network, and the coordinator may be away.

    The invite names several addresses: of this peer, those in its own invite, and of two members seen recently.
    """
    refuse_beside("--for", guest is not None, "guests", why="that peer alone may use it")
    say(_made(home or coordinator_home(), guest, guests, days), uncut=True)


def _made(folder: Path, guest: str | None, guests: int, days: int) -> str:
    from peer.identity import Identity, is_peer_id
    from swarm.run.home import Home
    from swarm.run.invite import read_saved_invite
    from swarm.run.inviting import known_addresses, make_invite, make_personal_invite
    from swarm.run.manifest import open_any_manifest
    from swarm.run.manifest_transfer import load_run_files

    if guest is not None and not is_peer_id(guest):
        raise ConfigError(f"--for {guest} is not a peer id: `peer doctor --home DIR` shows the id of a peer")
    home, kept = Home(folder), load_run_files(folder)
    if kept is None:
        raise ConfigError(f"{folder} holds no run yet: give the --home of `peer join` or `peer coordinate`")
    manifest = open_any_manifest(kept[0])
    if manifest.open:
        refuse("invites of an open run admit any peer and never expire", "guests", "days")
    identity = Identity.load_or_create(home.identity)
    addresses = known_addresses(home)
    if identity.peer_id == manifest.authority:
        if guest is not None:
            return str(make_personal_invite(identity, manifest, addresses, guest, days=days))
        return str(make_invite(identity, (), manifest, addresses, guests=guests, days=days))
    if guest is not None:
        raise ConfigError(f"{folder} is not the coordinator's home: leave out --for, or ask the owner of the run")
    chain = read_saved_invite(folder).membership(identity)
    return str(make_invite(identity, chain, manifest, addresses, guests=guests, days=days))
