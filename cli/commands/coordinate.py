"""`peer coordinate`: create a run from a RUN.toml and print its invite.

It also starts the run, and votes as its witness.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import trio
from click.core import ParameterSource

from cli.combinations import refuse_others, refuse_without
from cli.homes import choices_in, coordinator_home, encoded, last_port, on_the_port_of, taken_over
from cli.known_homes import note_home
from cli.options import home_option, reach_options, tied_option
from cli.progress.event_feed import EventFeed
from cli.progress.progress import Progress
from cli.run import run_until_stopped
from cli.templates import template, tuning_template, with_settings
from cli.terminal.lines import say, say_json
from cli.terminal.passphrase import ask_passphrase
from cli.tracking import track_option, tracked
from cli.views.live import follow, read_tails
from cli.views.loss_picture import leave_picture
from optim.config import EagerConfig
from peer.errors import ConfigError, ResourceError
from peer.figures import quoted
from peer.net.reach import Reach
from swarm.run.config import RunConfig, read_run_config
from swarm.run.home import Home
from swarm.run.hub_models import is_hub_id
from swarm.run.sections import check_name, schedule_caution
from swarm.web.webhook import check_url

if TYPE_CHECKING:
    from swarm.coordinator.coordinator import CoordinatorConfig
    from swarm.coordinator.successor import Successor
    from swarm.run.invite import Invite


@click.command()
@click.argument("run_toml", required=False, type=click.Path(path_type=Path), metavar="[RUN.toml]")
@click.option("--init", is_flag=True, help="Write a commented template, with a run of the file's name, and stop.")
@click.option(
    "--tune",
    metavar="BASE",
    help="With --init: a template that tunes an adapter of this checkpoint, a folder or an id OWNER/NAME of the Hub.",
)
@click.option(
    "--chats",
    type=click.Path(path_type=Path, exists=True),
    metavar="PATH",
    help="With --tune: the conversations to tune to, JSON lines with messages, or a folder of such files.",
)
@home_option("Key, initial weights and state of the run: keep it.  [default: ~/.barnraise/coordinator-NAME]")
@click.option(
    "--ban",
    "banned",
    multiple=True,
    metavar="PEER_ID|INVITE",
    help="Ban a peer and all that came by its invites, or all that came by the invite of this name, as `peer status"
    " --guests` shows it. May be given several times.",
)
@click.option(
    "--keep",
    "kept",
    multiple=True,
    metavar="PEER_ID",
    help="A peer that stays although it came by what --ban or --new-invite takes. May be given several times.",
)
@click.option(
    "--new-invite",
    is_flag=True,
    help="Withdraw the invite printed so far and print another. Of the peers that came by it those stay that take part"
    " now.",
)
@click.option(
    "--restored",
    is_flag=True,
    help="The home was put back from a backup: start no term and vote on nothing before `peer regroup`.",
)
@click.option(
    "--make-successor",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the run's key, locked by a passphrase that is asked for, for a successor if this machine is lost,"
    " and stop.",
)
@click.option(
    "--successor",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take over the run of this file, whose coordinator's machine is lost, in a new home. --bootstrap names a peer"
    " of the run, if those of the file are gone.",
)
@click.option(
    "--notify",
    default="",
    metavar="URL",
    help="POST a small JSON object to this address when members are missing and when the run is complete.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="The data set that the run trains on, as `peer data build` has written it. Members fetch its pages from here"
    " and from each other: all of them can read it.",
)
@track_option
@reach_options("/ip4/0.0.0.0/tcp/31337", "relay", "map_port", "lan", "bootstrap")
@click.option("--json", "as_json", is_flag=True, help="Print the invite and every event as JSON lines.")
@tied_option
@click.pass_context
def coordinate(
    context: click.Context,
    run_toml: Path | None,
    init: bool,
    tune: str | None,
    chats: Path | None,
    home: Path | None,
    banned: tuple[str, ...],
    kept: tuple[str, ...],
    new_invite: bool,
    restored: bool,
    make_successor: Path | None,
    successor: Path | None,
    notify: str,
    data: Path | None,
    track: str | None,
    reach: Reach,
    as_json: bool,
    tied: bool,
) -> None:
    """Create the run that RUN.toml describes, or continue the run in --home, and print the invite.

    Open runs and pipelines need this process for every round, unless RUN.toml makes it a witness. Other runs need
    it only to start, and when more than half of the members are lost at once. The invite holds its
    address: a restart takes over --listen, --announce, --relay, --bootstrap and --data, and the port, unless one is
    given.
    """
    if init:
        refuse_others("--init", "init", "tune", "chats", "run_toml")
        refuse_without("--tune", tune is not None, "chats")
        _write_template(run_toml or Path("RUN.toml"), tune, chats)
        return
    refuse_without("--init", init, "tune", "chats")
    if make_successor is not None:
        refuse_others("--make-successor", "make_successor", "home")
        _make_successor(home or coordinator_home(), make_successor)
        return
    heir = None if successor is None else _opened(successor, run_toml, reach.bootstrap)
    run = None if run_toml is None else read_run_config(run_toml)  # before the slow imports: a typo is reported at once
    for caution in () if run is None else _cautions(run):
        say(f"Warning: {caution}.", err=True)
    if kept and not (banned or new_invite):
        raise ConfigError("--keep names who stays of those that --ban or --new-invite takes: give one of these, too")
    if notify:
        check_url(notify)
    home = home or coordinator_home(heir.run if heir else None if run is None else run.run.name)
    if not tied:
        note_home(home)
    data = _data_set(run, home, data, tied)
    again: dict[str, Any] = {name: taken_over(context, home, name) for name in _KEPT}
    reach = replace(reach, **again)
    if (port := last_port(home)) and context.get_parameter_source("listen") is not ParameterSource.COMMANDLINE:
        reach = _kept_port(home, reach, port)
    from swarm.coordinator.coordinator import CoordinatorConfig

    config = CoordinatorConfig(home, run, reach, banned, kept, new_invite, restored, notify, heir, data)
    _run(config, track, as_json, tied)


def _cautions(run: RunConfig) -> list[str]:
    eager = run.outer.caution(run.run.max_peers) if isinstance(run.outer, EagerConfig) else ""
    found = [eager, schedule_caution(run.run, run.inner, run.outer), *run.run.cautions()]
    return [caution for caution in found if caution]


_KEPT: Final = ("listen", "announce", "relays", "bootstrap")


def _data_set(run: RunConfig | None, home: Path, given: Path | None, tied: bool) -> Path | None:
    """Return the data set to start with: the one that was given, built of the conversations that RUN.toml names, or
    that of the last start. A run that has begun keeps its own, whatever became of the conversations."""
    from swarm.run.manifest_transfer import MANIFEST_FILE

    if run is None or run.chats is None:
        return given or _last_data(home)
    if given is not None:
        raise ConfigError(f"--data names a data set, and [data] chats = {run.chats.path!r} another: leave one out")
    if os.path.exists(home / MANIFEST_FILE) and not Home(home).unbegun.exists():
        return _last_data(home)
    from cli.page_builds import chat_set

    return chat_set(run.chats, run, home, tied)


def _last_data(home: Path) -> Path | None:
    """Return the data set of the last start from this home; None if there was none or its folder is gone."""
    kept = choices_in(home).get("data")
    if not isinstance(kept, str):
        return None
    if not os.path.isdir(kept):
        say(f"Warning: the data set in {kept} is gone: members have the pages that they keep, or none.", err=True)
        return None
    return Path(kept)


def _kept_port(home: Path, reach: Reach, port: int) -> Reach:
    """Return `reach` listening again at the port that the invite names. Raises ResourceError if one is taken."""
    from peer.net.listen_address import check_port_free
    from swarm.coordinator.second_process import refuse_second

    if not (reach.announce or os.path.exists(Home(home).choices)):  # an earlier release's, or no start was chosen
        reach = replace(reach, listen=(f"{reach.listen[0].rpartition('/')[0]}/{port}",))
    reach = on_the_port_of(home, reach)
    for address in reach.listen:
        try:
            check_port_free(address)
        except ResourceError as error:
            trio.run(refuse_second, Home(home))  # who has it may be another process of this run
            raise ResourceError(
                f"the port of {address}, which this run's invites name, is taken or closed ({error.__cause__}): end the"
                " process that has it, or give another address with --listen and send the new invite"
            ) from error
    return reach


def _make_successor(home: Path, path: Path) -> None:
    from swarm.coordinator.successor import make_successor

    name = make_successor(Home(home), path, lambda: ask_passphrase(str(path), confirmed=True))
    say(
        f"Wrote {path}. Who has it and its passphrase can take over the run {name}: keep both apart, on no machine of"
        f" the run. If this one is lost: peer coordinate --successor {quoted(path)} --home NEW_FOLDER",
        uncut=True,
    )


def _opened(path: Path, run_toml: Path | None, bootstrap: tuple[str, ...]) -> Successor:
    from swarm.coordinator.successor import open_successor, read_successor

    if run_toml is not None:
        raise ConfigError("the run of --successor has its rules: leave RUN.toml out")
    read_successor(path)  # before a person types
    return open_successor(path, ask_passphrase(str(path)), bootstrap)


def _write_template(path: Path, tune: str | None, chats: Path | None) -> None:
    text = template() if tune is None else tuning_template(_checkpoint(tune), "" if chats is None else _absolute(chats))
    try:
        check_name(path.stem)
    except ValueError as error:
        raise ConfigError(f"{path!s} would name the run, too: name a file of 1 to 64 printable letters") from error
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(with_settings(text, "run", {"name": path.stem}))
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already: name another file, or delete it first") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): name a file in another folder") from error
    data = "" if tune is None or chats is not None else " --data DIR"
    say(f"Wrote {path}. Edit it, then: peer coordinate {quoted(path)}{data}")


def _absolute(path: Path) -> str:
    """Return how RUN.toml names a path. Raises ConfigError for one that is not UTF-8, which no TOML holds."""
    name = os.path.abspath(path)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the name {name!a} is not UTF-8: rename it or name a link to it") from error
    return name


def _checkpoint(name: str) -> str:
    """Return how RUN.toml names a checkpoint: its id, or the whole path of its folder. Raises ConfigError."""
    if os.path.isdir(name):
        return os.path.abspath(name)
    if not is_hub_id(name):
        raise ConfigError(f"{name} is no folder: name that of a checkpoint, or its id on the Hub as OWNER/NAME")
    return name


_REACH: Final = {
    "everywhere": "",
    "network": "These are addresses of your own network. A group takes [run] members_per_prefix machines from it (8"
    " unless RUN.toml says more). For peers beyond it forward a port and name it (--announce"
    " /ip4/PUBLIC_IP/tcp/PORT), use a relay (--relay), or send them the invite of a member that they can reach"
    " (`peer invite`).",
    "machine": "Only this machine can reach that address. Listen on another (--listen /ip4/0.0.0.0/tcp/31337) for peers"
    " elsewhere.",
}


def _run(config: CoordinatorConfig, track: str | None, as_json: bool, tied: bool) -> None:
    from peer.files import write_atomically
    from swarm.coordinator.coordinator import run_coordinator

    opened = False

    def ready(invite: Invite) -> None:
        nonlocal opened
        again, opened, text = opened, True, str(invite)
        write_atomically(Home(config.home).invite, f"{text}\n".encode())
        if again:  # it names other members: the one on the screen stays good
            return
        kept = {name: getattr(config.reach, name) for name in _KEPT} | {"data": config.data}
        write_atomically(Home(config.home).choices, encoded(kept))
        if as_json:
            shown = {"event": "invite", "invite": text, "run_id": invite.run_id, "addresses": list(invite.addresses)}
            say_json(shown, uncut=True)
            return
        say(f"Run {invite.run_id} is open at {', '.join(invite.addresses)}", err=True, uncut=True)
        if caution := _REACH[invite.reach]:
            say(caution, err=True)
        if config.data is not None:
            say(f"All members can read the data set in {config.data}.", err=True)
        say("To take part, run on another machine:", "", err=True)
        say(f"peer join {text}", "", uncut=True)
        progress.pinned = f"The invite stands in {Home(config.home).invite}; Ctrl-C stops."

    progress = Progress(f"coordinator   home {config.home}", homes={"coordinator": config.home})
    feed = EventFeed()

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, progress, {"coordinator": feed}, as_json)
            await run_coordinator(config, ready, watch)
            nursery.cancel_scope.cancel()

    try:
        with tracked(track, config.home, "", "coordinator", feed.take) as watch:
            run_until_stopped(work, tied)
    finally:
        read_tails(progress, {"coordinator": feed}, as_json)
        if opened:
            say(_farewell(progress, config.home), err=True)
            if not tied:  # the program that started this one draws what all its peers saw
                leave_picture(config.home, lambda line: say(line, err=True))


def _farewell(progress: Progress, home: Path) -> str:
    if progress.complete:
        export = f"`peer export {Home(home).option} --out DIR`"
        return f"The run is complete. It is kept in {home}; {export} writes the model."
    restart = f"Restart with: peer coordinate {Home(home).option}"
    if not any(group.facts and group.facts.members for group in progress.groups.values()):
        return f"The run is kept in {home}. {restart}"
    return f"The run is kept in {home}; its members keep training, or wait where they need its vote. {restart}"
