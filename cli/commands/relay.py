"""`peer relay`: run a relay for peers behind NAT."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import trio

from cli.homes import default_home
from cli.known_homes import note_home
from cli.options import Number, amount_option, count_option, home_option, reach_options
from cli.run import run_until_stopped
from cli.terminal.lines import say, say_json
from peer.figures import several, size_text
from peer.net.reach import Reach

if TYPE_CHECKING:
    from peer.net.relay.circuit import RelayCounts
    from peer.net.relay.ledger import RelayLimits

_RESERVATIONS_MAX: Final = 1600  # each holds one of the host's connections
_CIRCUITS_MAX: Final = 5000
_FILES: Final = 4096  # more than the host has connections


@click.command()
@reach_options("/ip4/0.0.0.0/tcp/4001")
@amount_option("--rate", "MBIT", "The most that it forwards for all peers together, in Mbit/s.")
@count_option("--reservations", 1, _RESERVATIONS_MAX, 512, "Peers behind NAT to serve at a time.")
@count_option("--circuits", 1, _CIRCUITS_MAX, 1024, "Connections to forward at a time.")
@count_option("--circuit-gb", 1, 1_000_000, 1000, "GB that one connection may carry each way.")
@count_option("--circuit-hours", 1, 720, 24, "Hours that one connection may last.")
@click.option(
    "--status-every",
    type=Number(0, 86400, min_open=True),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="How often to print what the relay does.",
)
@home_option("Folder for the relay's key, so that its address stays the same.  [default: ~/.barnraise/relay]")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help='Print one JSON object, {"peer", "addresses"}, once it runs, and then one for each status.',
)
def relay(
    reach: Reach,
    rate: float | None,
    reservations: int,
    circuits: int,
    circuit_gb: int,
    circuit_hours: int,
    status_every: float,
    home: Path | None,
    as_json: bool,
) -> None:
    """Run a relay on a public machine until Ctrl-C.

    Peers behind NAT reserve a place at the relay (`peer join --relay ADDRESS`) and are called through it. They switch
    to direct connections where their routers allow it. The relay sees which peers talk, but not what they say.
    """
    from peer.identity import Identity
    from peer.net.relay.ledger import RelayLimits
    from peer.net.relay.server import open_relay
    from swarm.run.home import Home

    folder = Home(home or default_home("relay"))
    note_home(folder.path)
    limits = RelayLimits(
        reservations=reservations,
        reservations_per_prefix=max(8, reservations // 8),
        circuits=circuits,
        circuit_s=circuit_hours * 3600,
        circuit_bytes=circuit_gb * 10**9,
        rate_bytes_per_s=None if rate is None else rate * 1e6 / 8,
    )

    async def serve() -> None:
        async with open_relay(Identity.load_or_create(folder.identity), reach, limits) as running:
            _print_addresses(running.peer_id, running.addresses, as_json)
            while True:
                await trio.sleep(status_every)
                _print_status(running.counts(), limits, as_json)

    _allow_files()
    with folder.locked():
        run_until_stopped(serve)


def _print_addresses(peer_id: str, addresses: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        say_json({"peer": peer_id, "addresses": addresses}, uncut=True)
        return
    say("The relay runs. Give peers one of these addresses for --relay:")
    say(*(f"  {address}" for address in addresses), uncut=True)


def _print_status(counts: RelayCounts, limits: RelayLimits, as_json: bool) -> None:
    if as_json:
        say_json(asdict(counts))
        return
    say(
        f"{several(counts.reservations, 'reservation')} of {limits.reservations},"
        f" {several(counts.circuits, 'circuit')} of {limits.circuits},"
        f" {size_text(counts.bytes_relayed)} relayed, {several(counts.refused, 'request')} refused"
    )


def _allow_files() -> None:
    """Let this process have as many sockets as it takes connections: some systems allow 256 unless they are asked."""
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
            if soft != resource.RLIM_INFINITY and soft < most:
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
