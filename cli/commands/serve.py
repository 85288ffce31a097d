"""`peer serve`: serve blocks of a model with this machine.

It ends at Ctrl-C.
"""

from __future__ import annotations

import os
import re
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.combinations import is_given, refuse_beside, refuse_without
from cli.homes import ResumingServer, chosen, default_home, on_a_free_port
from cli.known_homes import note_home, word_for
from cli.options import (
    amount_option,
    checkpoint_folder,
    dtype_option,
    home_option,
    invite_argument,
    quantize_option,
    reach_options,
    read_invite,
    template_option,
    threads_option,
    tied_option,
)
from cli.progress.event_feed import EventFeed
from cli.progress.served_blocks import ServedBlocks
from cli.run import run_until_stopped
from cli.terminal.lines import say, say_json
from cli.views.live import follow, follow_to_the_end, read_tails
from cli.views.served_blocks import served_blocks_view
from peer.errors import ConfigError
from peer.footprint.layout import Compute
from peer.net.reach import Reach
from swarm.run.home import Home
from swarm.run.invite import PREFIX, Invite, read_saved_invite

if TYPE_CHECKING:
    from peer.config import HiddenType, Quantization
    from peer.ipc.span import Span


class BlockRange(click.ParamType):  # type: ignore[type-arg]
    """auto, or two numbers with a colon."""

    name = "auto|a:b"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int] | None:
        if value is None or value == "auto" or isinstance(value, tuple):
            return None if value == "auto" else value  # type: ignore[return-value]
        found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", str(value))
        if found is None or int(found[1]) >= int(found[2]):
            self.fail(f"{value!r} is no range of blocks: write auto, or the first and the one after the last, as 0:16")
        return int(found[1]), int(found[2])


class NamedFolder(click.ParamType[tuple[str, str]]):
    """NAME=DIR: a name, and the whole path of a folder that exists."""

    name = "NAME=DIR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, _, folder = value.partition("=")
        if not name or not os.path.isdir(folder):
            self.fail(f"{value!r} is no name with a folder: write --adapter NAME=DIR", param, ctx)
        return name, os.path.abspath(folder)


@click.command(cls=ResumingServer)
@invite_argument(required=False)
@click.option(
    "--model",
    metavar="DIR|HF_ID|INVITE",
    help="A checkpoint in the Hugging Face layout, or the id of one that was downloaded. Without INVITE: found a served"
    " model of it. With one: read its parts from here instead of fetching them.",
)
@click.option("--blocks", type=BlockRange(), default="auto", show_default=True, help="The blocks to serve, as 0:16.")
@amount_option("--memory", "GB", "For weights and caches.  [default: 0.6 of what is free, or of the GPU's]")
@home_option("Folder for this peer's key, fetched weights and event log.  [default: ~/.barnraise/<model>]")
@click.option("--name", default="", help="The name that others see.  [default: this machine's name]")
@dtype_option("A model that is founded: what it is served in.  [default: the checkpoint's own type]")
@quantize_option("A model that is founded: hold its blocks in 8 or 4 bits.  [default: as the checkpoint is]")
@click.option(
    "--adapter",
    "adapters",
    type=NamedFolder(),
    multiple=True,
    metavar="NAME=DIR",
    help="A model that is founded: serve this adapter of it (PEFT's files), too, under this name. May be given several"
    " times.",
)
@template_option(
    "A model that is founded: how messages to it become text", "default, else the first that needs no tools"
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps, ...")
@threads_option("CPU threads.")
@click.option("--open", "is_open", is_flag=True, help="A model that is founded: let any peer serve and use it.")
@reach_options("/ip4/0.0.0.0/tcp/0", "relay", "map_port")
@click.option("--json", "as_json", is_flag=True, help="Print every event as a JSON line.")
@tied_option
@click.pass_context
def serve(
    context: click.Context,
    invite: str | None,
    model: str | None,
    blocks: tuple[int, int] | None,
    memory: float | None,
    home: Path | None,
    name: str,
    dtype: HiddenType | None,
    template: str | None,
    device: str,
    threads: int | None,
    quantize: Quantization | None,
    adapters: tuple[tuple[str, str], ...],
    is_open: bool,
    reach: Reach,
    as_json: bool,
    tied: bool,
) -> None:
    """Serve blocks of the model of INVITE, or of a checkpoint (--model), with this machine. With the INVITE of a
    training run: serve its last commit, and follow it between answers.

    Prints an invite: with it other machines serve further blocks (`peer serve INVITE`), and anyone uses the model
    (`peer generate INVITE "..."`). Ctrl-C leaves: clients move to other servers. With --home and without INVITE a
    server continues as it was started last, with the options of then; those that are given now replace them.
    """
    opened, folder = _source(invite, _kept_or_given(model, home))
    if opened is None and home is not None and not is_given("model"):
        opened = _joined(home)
    founders = ("is_open", "dtype", "quantize", "template", "adapters")
    refuse_beside("INVITE", opened is not None, *founders, why="the model of an INVITE was founded with them")
    refuse_without("--model", folder is not None, "is_open")
    if opened is None and folder is None and home is None:
        raise click.UsageError("Give the INVITE of a served model, or --model with the folder of a checkpoint.")
    from peer.compute.device import resolve_device
    from swarm.serving.memory import given_memory
    from swarm.serving.peer import ServeConfig, run_server

    computes_on = resolve_device(device)  # before the network is asked
    source = opened.run_id[:12] if opened is not None else folder.name if folder is not None else ""
    home = home or default_home(f"serve-{source}")
    if not tied:
        note_home(home)
    context.params["model"] = folder  # for `chosen`: the next start may be typed elsewhere
    config = ServeConfig(
        home=home,
        invite=opened,
        folder=folder,
        name=name or socket.gethostname(),
        reach=on_a_free_port(home, reach),
        compute=Compute(device, threads=threads, memory_bytes=given_memory(memory, computes_on.memory_bytes)),
        blocks=blocks,
        is_open=is_open,
        dtype=dtype,
        quantization=quantize,
        template=template,
        adapters={name: Path(folder) for name, folder in adapters},
        choices=chosen(context, *founders),
    )
    seen = ServedBlocks(f"home {home}", note=_unsaid if as_json else _tell)
    served = False

    def ready(printed: Invite, span: Span) -> None:
        nonlocal served
        first, served = not served, True
        if as_json:
            say_json({"event": "serving", "invite": str(printed), "first": span.first, "end": span.end}, uncut=True)
            return
        say(f"Serving blocks {span.first} to {span.end - 1} of {span.of}.", err=True)
        if first:
            seen.address, seen.short = printed.addresses[0].partition("/p2p/")[0], word_for(config.home)
            _say_commands(printed, seen.short)

    feed = EventFeed()

    async def work() -> None:
        show = partial(follow, seen, {config.name: feed}, as_json, served_blocks_view)
        await follow_to_the_end(show, run_server(config, ready, feed.take))

    try:
        run_until_stopped(work, tied)
    finally:
        read_tails(seen, {config.name: feed}, as_json)
        if served:
            say(f"Left. Serve again: `peer serve {Home(home).option}`.", err=True)


def _say_commands(printed: Invite, short: str) -> None:
    """Say what to run with the invite, each command whole on a line of its own."""
    say("To serve further blocks, or these once more, run on another machine:", "", err=True)
    say(f"peer serve {printed}", "", uncut=True)
    say("To use the model:", "", err=True)
    say(f'peer generate {printed} "Once upon a time"', "", uncut=True)
    say(f"peer chat {printed}", "", uncut=True)
    say(f"peer api {printed}", "", uncut=True)
    say(f"On this machine {short} means the invite: peer chat {short}", err=True)


def _kept_or_given(model: str | None, home: Path | None) -> str | None:
    """Return --model as given now or at the last start. Raises ConfigError if the checkpoint of then has gone."""
    if model is not None and not is_given("model") and not os.path.isdir(model):
        raise ConfigError(
            f"the checkpoint {model}, which was served from {home}, has gone: put it back, or name its folder with"
            " --model"
        )
    return model


def _joined(home: Path) -> Invite | None:
    """Return the invite by which the peer of a home came; None of a founder, and of a home without one."""
    from peer.identity import Identity

    if not os.path.exists(Home(home).invite) or not os.path.exists(Home(home).identity):
        return None
    invite = read_saved_invite(home)
    return None if Identity.load_or_create(Home(home).identity).peer_id == invite.authority else invite


def _source(invite: str | None, model: str | None) -> tuple[Invite | None, Path | None]:
    """Return what INVITE and --model name; an invite may stand in either place."""
    if model is not None and invite is None and model.strip().lower().startswith(PREFIX):
        invite, model = model, None
    return None if invite is None else read_invite(invite), None if model is None else checkpoint_folder(model)


def _tell(line: str) -> None:
    say(line, err=True)


def _unsaid(line: str) -> None:
    """Say nothing: the events are printed."""
