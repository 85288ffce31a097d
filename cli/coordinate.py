"""`peer coordinate`: found a run, invite to it, begin it, and regroup it where a majority was lost."""

from __future__ import annotations

from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from cli.edge import run_until_stopped
from cli.live import event_line, follow, read_tails
from cli.options import default_home, home_option, network_options, tied_option
from cli.progress import Progress
from cli.tail import EventTail
from peer.errors import ConfigError

if TYPE_CHECKING:
    from swarm.coordinator import CoordinatorConfig
    from swarm.invite import Invite


@click.command()
@click.argument("run_toml", required=False, type=click.Path(path_type=Path), metavar="[RUN.toml]")
@click.option("--init", is_flag=True, help="Write a commented template to RUN.toml and stop.")
@home_option("Key, initial weights, signatures: needed to come back.  [default: ~/.barnraise/coordinator]")
@click.option(
    "--bootstrap",
    multiple=True,
    metavar="MULTIADDR",
    help="A further meeting point to name in the invite; may be given several times.",
)
@network_options(listen="/ip4/0.0.0.0/tcp/31337")
@click.option("--json", "as_json", is_flag=True, help="Print the invite and every event as JSON lines.")
@tied_option
def coordinate(
    run_toml: Path | None,
    init: bool,
    home: Path | None,
    bootstrap: tuple[str, ...],
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    relays: tuple[str, ...],
    as_json: bool,
    tied: bool,
) -> None:
    """Found the run that RUN.toml describes, or go on with the one in --home, and print the invite.

    Training does not stop while this process is away: it is needed to begin the run, and to regroup it when more than
    half of its members are lost at once. Its address is in the invite, so come back on the same port.
    """
    if init:
        _write_template(run_toml or Path("RUN.toml"))
        return
    home = home or default_home("coordinator")
    _run(_config(run_toml, home, listen, announce, relays, bootstrap), as_json, tied)


def template() -> str:
    """The commented RUN.toml of the embedded example."""
    return (files("cli") / "templates" / "run.toml").read_text()


def _write_template(path: Path) -> None:
    try:
        with path.open("x") as file:
            file.write(template())
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already: name another file, or delete it first.") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): name a file in a folder of yours.") from error
    click.echo(f"Wrote {path}. Edit it, then: peer coordinate {path}")


def _config(
    run_toml: Path | None,
    home: Path,
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    relays: tuple[str, ...],
    bootstrap: tuple[str, ...],
) -> CoordinatorConfig:
    from swarm.run_config import read_run_config

    run = None if run_toml is None else read_run_config(run_toml)  # before the slow imports: a typo is told at once
    from swarm.coordinator import CoordinatorConfig

    return CoordinatorConfig(home, run, listen, announce, relays, bootstrap)


def _run(config: CoordinatorConfig, as_json: bool, tied: bool) -> None:
    from swarm.charter import write_atomically
    from swarm.coordinator import run_coordinator
    from swarm.home import Home

    def ready(invite: Invite) -> None:
        text = str(invite)
        write_atomically(Home(config.home).invite, f"{text}\n".encode())
        if as_json:
            click.echo(event_line("invite", invite=text, run_id=invite.run_id, addresses=list(invite.addresses)))
            return
        click.echo(f"Run {invite.run_id} is open at {', '.join(invite.addresses)}", err=True)
        click.echo("Others take part with:\n", err=True)
        click.echo(f"peer join {text}\n")

    progress = Progress(f"coordinator   home {config.home}")
    tail = EventTail(Home(config.home).events, from_end=True)

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, progress, {"coordinator": tail}, as_json)
            await run_coordinator(config, ready)
            nursery.cancel_scope.cancel()

    with closing(tail):
        try:
            run_until_stopped(work, tied)
        finally:
            read_tails(progress, {"coordinator": tail}, as_json)
            if (Home(config.home).invite).exists():
                click.echo(
                    f"The run is kept in {config.home}; the members train on. Come back with:"
                    f" peer coordinate --home {config.home}",
                    err=True,
                )
