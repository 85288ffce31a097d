"""`peer join`: take part in a run with this machine.

It ends when the run is complete, or at Ctrl-C.
"""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.combinations import refuse, refuse_beside, refuse_without
from cli.homes import ResumingCommand, chosen, default_home, on_a_free_port, resumed_invite
from cli.known_homes import home_meant, note_home
from cli.options import (
    amount_option,
    compute_options,
    count_option,
    home_option,
    invite_argument,
    reach_options,
    read_invite,
    text_options,
    tied_option,
)
from cli.progress.event_feed import EventFeed
from cli.progress.progress import Progress
from cli.run import leaves, run_until_stopped
from cli.terminal.lines import say
from cli.tracking import track_option, tracked
from cli.views.live import follow, follow_to_the_end, read_tails
from cli.views.loss_picture import leave_picture
from peer.catalogue.happening import LOWER_RATE
from peer.errors import Diverged, NotAdmitted
from peer.figures import several
from peer.footprint.layout import Compute
from peer.ipc.corpus_messages import OwnText
from peer.net.reach import Reach
from swarm.run.home import Home

if TYPE_CHECKING:
    from swarm.run.peer_context import JoinConfig, Role, StatePlace
    from swarm.training.peer import Beside


_STAGE_MAX = (1 << 16) - 1


@click.command(cls=ResumingCommand)
@invite_argument(required=False)
@home_option("Folder for this peer's key, checkpoints and event log.  [default: ~/.barnraise/<run id>]")
@click.option("--name", default="", help="The name shown by `peer status`.  [default: this machine's name]")
@compute_options
@text_options(
    "Train on the text in this folder or file; in a run of a data set, a folder with that data set.  [default: the"
    " run's source, unless that is a folder]"
)
@click.option(
    "--base",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="In a run that tunes a checkpoint: its folder on this machine.  [default: fetch it from members]",
)
@amount_option(
    "--data-cache",
    "GB",
    "Disk for pages of the run's data set that come from other peers.  [default: all, at most a tenth of what is free]",
)
@click.option(
    "--data-url",
    default="",
    metavar="URL",
    help="A web server with the folder of the run's data set, which is asked for pages that no member has.",
)
@amount_option("--upload-limit", "MB/S", "Never send faster.")
@amount_option("--download-limit", "MB/S", "Never receive faster.")
@click.option(
    "--role",
    type=click.Choice(["auto", "full", "stage", "feeder"]),
    default="auto",
    show_default=True,
    help="full: train the whole model (a run without stages). stage: train one stage of a pipeline. feeder: only read"
    " training text for a pipeline (no accelerator needed). auto: full or stage, as the run needs.",
)
@count_option(
    "--nice", 10, 19, 10, "How far training gives way to this machine's other programs; 19: as far as can be."
)
@click.option(
    "--pause-when",
    "pause_when",
    multiple=True,
    metavar="CONDITION",
    help="Give the machine back to you while it holds: program:NAME, keyboard:MINUTES, battery, outside:HH:MM-HH:MM."
    " May be given several times.",
)
@click.option(
    "--stage", type=click.IntRange(0, _STAGE_MAX), help="Stay at this stage of a pipeline.  [default: where needed]"
)
@click.option(
    "--state",
    type=click.Choice(["auto", "memory", "disk"]),
    default="auto",
    show_default=True,
    help="Where the run's state lies: disk keeps it in files of --home, for a model that memory has no room for. auto:"
    " memory, where all that the peer takes is at most 0.8 of what is free.",
)
@track_option
@click.option("--serve", "serves", is_flag=True, help="Serve the run's last commit as well, while it trains.")
@amount_option("--serve-memory", "GB", "With --serve.  [default: 0.6 of what training leaves free]")
@reach_options("/ip4/0.0.0.0/tcp/0", "relay", "map_port", "lan")
@click.option(
    "--client/--no-client",
    default=False,
    help="Dial the other peers, be dialled by none, and merge nothing: so a peer is by itself where it is not reached.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every event as a JSON line instead of a live view.")
@tied_option
@click.pass_context
def join(
    context: click.Context,
    invite: str | None,
    home: Path | None,
    name: str,
    compute: Compute,
    text: OwnText,
    base: Path | None,
    data_cache: float | None,
    data_url: str,
    upload_limit: float | None,
    download_limit: float | None,
    role: Role,
    nice: int,
    pause_when: tuple[str, ...],
    stage: int | None,
    state: StatePlace,
    track: str | None,
    serves: bool,
    serve_memory: float | None,
    reach: Reach,
    client: bool,
    as_json: bool,
    tied: bool,
) -> None:
    """Take part in the run of INVITE (the string, or a file that holds it) with this machine.

    Ctrl-C leaves at the next safe moment and keeps the last commit. With --home alone a peer continues as it was
    started last, with the invite and the options of then; those that are given now replace them.
    `peer pause` gives the machine back to you until `peer resume`.
    With --serve this machine also answers with the run's last commit: `peer generate INVITE "..."` asks it.
    """
    opened = resumed_invite(home) if invite is None else read_invite(invite)  # before the slow imports: a typo is told
    from peer.compute.device import resolve_device
    from swarm.pages.mirror import check_mirror
    from swarm.run.pause_conditions import parse_condition
    from swarm.run.peer_context import JoinConfig
    from swarm.training.peer import run_participant

    refuse_without("--serve", serves, "serve_memory")
    of_training = ("compiles", "memory_limit", "host_memory_limit", "dtype", "weights", "state")
    refuse_beside("--role feeder", role == "feeder", *of_training)
    conditions = tuple(map(parse_condition, pause_when))
    if data_url:
        check_mirror(data_url)
    for each in dict.fromkeys(compute.all_devices):  # before the network is asked
        if resolve_device(each).torch.type == "cpu":
            refuse("on a CPU --memory-limit is that of the machine", "host_memory_limit")
    home = home or (None if invite is None else home_meant(invite)) or default_home(opened.run_id[:12])
    if not tied:
        note_home(home)
    config = JoinConfig(
        home=home,
        invite=opened,
        name=name or socket.gethostname(),
        reach=on_a_free_port(home, reach),
        client=client,
        compute=compute,
        text=text,
        base=None if base is None else base.absolute(),
        data_cache_bytes=None if data_cache is None else data_cache * 1e9,
        data_url=data_url,
        upload_bytes_per_s=None if upload_limit is None else upload_limit * 1e6,
        download_bytes_per_s=None if download_limit is None else download_limit * 1e6,
        role=role,
        nice=nice,
        pause_when=conditions,
        stage=stage,
        state=state,
        choices=chosen(context),
    )
    beside = _server(config, serve_memory) if serves else None
    progress = Progress(f"run {opened.run_id}   home {home}", homes={config.name: home})
    feed = EventFeed()

    async def work() -> None:
        show = partial(follow, progress, {config.name: feed}, as_json)
        await follow_to_the_end(show, run_participant(config, watch, beside))

    try:
        with tracked(track, home, opened.run_id, config.name, feed.take) as watch:
            run_until_stopped(work, tied)
        read_tails(progress, {config.name: feed}, as_json)
        progress.left_complete = True
        if ends := farewell(progress):
            say(ends, err=True)
    except BaseException as error:  # raised again: a group may hold the reason beside a signal's
        progress.left_for_good = any(isinstance(cause, (Diverged, NotAdmitted)) for cause in leaves(error))
        raise
    finally:
        read_tails(progress, {config.name: feed}, as_json)  # the last checkpoint is saved after everything else
        if kept := what_was_kept(progress, config.home):
            say(kept, err=True)
        if not tied:  # the program that started this one draws what all its peers saw
            leave_picture(config.home, lambda line: say(line, err=True))


def _server(config: JoinConfig, memory: float | None) -> Beside:
    """Return what serves the run beside the training."""
    from swarm.serving.beside_training import serve_beside_training

    return partial(serve_beside_training, config, None if memory is None else memory * 1e9)


def farewell(progress: Progress) -> str:
    """Return what a run that is over has come to, as far as this peer's own steps tell; empty if a note has said it."""
    rounds = progress.rounds
    over = f"complete: round {rounds} of {rounds}" if rounds else "The run is complete"
    peer = next(iter(progress.peers.values()), None)
    if peer is None or not 0 < peer.useless_round == peer.round:
        if progress.told_complete:
            return ""
        return over if rounds else f"{over}."
    return (
        f"{over}, but no step of its last round was of any use here, as their loss or gradient was NaN or infinite:"
        f" {LOWER_RATE}."
    )


def what_was_kept(progress: Progress, home: Path) -> str:
    """Return what was saved, for a user who leaves; empty if there is nothing to report."""
    peer = next(iter(progress.peers.values()), None)
    again = f"`peer join {Home(home).option}`"
    over = progress.complete or progress.left_complete or progress.left_for_good
    if peer is not None and peer.fed is not None:
        fed = peer.fed[1]
        readers = several(len(fed.peers), "peer")
        read = f"Read {several(fed.micro_batches, 'micro-batch')} for {readers}. A feeder saves nothing."
        return read if over else f"{read} Join again: {again}."
    if progress.saved is None and (progress.left_unsaved or over or not os.path.exists(Home(home).invite)):
        return ""  # an error says it, or there is nothing to join again
    if progress.saved is None:
        after = f"after round {progress.round}" if progress.round else "before the first commit of this peer"
        return f"Left {after}. No checkpoint was written: joining again ({again}) fetches the state from peers."
    saved, stage = progress.saved
    of, options, also = "", Home(home).option, ""
    if stage is not None:
        of, options, also = f" of stage {stage}", f"{options} ...", ", with a --home of each other stage,"
    what = f"Saved: round {saved.round}{of} in {saved.path}"
    export = f"`peer export {options} --out DIR`{also} writes a model from it."
    if peer is not None and peer.claims.stage != stage:
        return f"{what}. Nothing is saved yet of stage {peer.claims.stage}, where this peer moved. {export}"
    if over:
        return f"{what}. {export}"
    return f"{what}. Join again to continue from there: {again}. {export}"
