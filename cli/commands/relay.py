"""`peer relay`: run a relay for peers behind NAT."""

from __future__ import annotations

from pathlib import Path

import click

from cli.homes import default_home
from cli.options import home_option
from cli.run import run_until_stopped
from cli.terminal.lines import say, say_json


@click.command()
@click.option(
    "--listen",
    multiple=True,
    metavar="MULTIADDR",
    default=("/ip4/0.0.0.0/tcp/4001",),
    show_default=True,
    help="Address to accept connections on. May be given several times.",
)
@click.option(
    "--announce",
    multiple=True,
    metavar="MULTIADDR",
    help="Address to publish instead, e.g. /ip4/203.0.113.7/tcp/4001. May be given several times.",
)
@home_option("Folder for the relay's key, so that its address stays the same.  [default: ~/.barnraise/relay]")
@click.option("--json", "as_json", is_flag=True, help='Print one JSON object, {"peer", "addresses"}, once it runs.')
def relay(listen: tuple[str, ...], announce: tuple[str, ...], home: Path | None, as_json: bool) -> None:
    """Run a relay on a public machine until Ctrl-C.

    Peers behind NAT reserve a place at the relay (`peer join --relay ADDRESS`) and are called through it. They switch
    to direct connections where their routers allow it. The relay sees which peers talk, but not what they say.
    """
    from peer.identity import Identity
    from peer.net.relay_daemon import RelayConfig, open_relay
    from swarm.run.home import Home

    folder = Home(home or default_home("relay"))

    async def serve() -> None:
        config = RelayConfig(Identity.load_or_create(folder.identity), listen, announce)
        async with open_relay(config) as running:
            _print_addresses(running.peer_id, running.addresses, as_json)
            await running.wait()

    with folder.locked():
        run_until_stopped(serve)


def _print_addresses(peer_id: str, addresses: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        say_json({"peer": peer_id, "addresses": addresses}, uncut=True)
        return
    say("The relay runs. Give peers one of these addresses for --relay:")
    say(*(f"  {address}" for address in addresses), uncut=True)
