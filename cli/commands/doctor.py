"""`peer doctor`: check whether this machine can take part in a run.

It says how to fix what prevents it.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec
import trio
from msgspec.structs import replace
from rich.text import Text

from cli.checks.confinement import confinement_findings
from cli.checks.graphics import gpu_findings
from cli.checks.machine import DISK_MIN_BYTES, Finding, disk_finding, local_findings
from cli.combinations import refuse_without
from cli.homes import default_home
from cli.options import (
    device_options,
    home_option,
    invite_argument,
    reach_options,
    read_invite,
    text_options,
)
from cli.run import run_until_stopped
from cli.terminal.lines import LINE_MAX, say, say_json
from cli.terminal.screen import screen
from peer.figures import several
from peer.footprint.layout import Compute
from peer.ipc.corpus_messages import OwnText
from peer.net.reach import Reach
from peer.plain_text import plain

_MARKS = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "failure": ("FAILURE", "red")}


@click.command()
@invite_argument(required=False)
@home_option("The home that `peer join` would use.  [default: ~/.barnraise/<run id>]")
@device_options
@text_options("Check the text or data set in this folder or file against the run, or without INVITE for any.")
@reach_options("/ip4/0.0.0.0/tcp/0", "relay")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per check.")
def doctor(
    invite: str | None,
    home: Path | None,
    compute: Compute,
    text: OwnText,
    reach: Reach,
    as_json: bool,
) -> None:
    """Check whether this machine can take part in the run of INVITE: versions, device, the
    worker's confinement, disk, port, addresses, clock.

    Without INVITE only the machine itself is checked. With --home a key is made there if it is missing, so that you
    can send your peer id to the coordinator of a closed run. Give --home, --device, --devices, --layout, --data,
    --text-field, --listen, --announce and --relay as you would to `peer join INVITE`. Of a model in stages the smallest
    stage must fit; a larger one that does not fit is a warning. The exit code is 0 if this machine can take part, else
    that of the error that `peer join INVITE` would end with.
    """
    refuse_without("--data or INVITE", bool(text.folder) or invite is not None, "text_field")
    opened = None if invite is None else read_invite(invite)
    make_key = home is not None
    home = home or default_home("peer" if opened is None else opened.run_id[:12])
    kept = home if os.path.exists(home) else None  # Path.exists raises for a name that is too long
    text = replace(text, folder=text.folder and str(Path(text.folder).absolute()))
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        if as_json:
            say_json(msgspec.to_builtins(finding))
        else:
            _show(finding)

    named = compute.all_devices
    for finding in (*local_findings(home, named, make_key), *gpu_findings(named), *confinement_findings()):
        report(finding)

    async def check_network() -> None:
        from cli.checks.network import port_finding, swarm_findings
        from swarm.run.peer_context import JoinConfig

        port = await port_finding(reach)
        report(port)
        if opened is None:
            report(disk_finding(home, [DISK_MIN_BYTES]))
            if text.folder:
                from cli.checks.data_set import folder_finding, is_data_set
                from cli.checks.text import text_finding

                if is_data_set(text.folder):
                    report(await trio.to_thread.run_sync(folder_finding, Path(text.folder)))
                else:
                    report(await text_finding(text))
        elif port.state == "ok":
            config = JoinConfig(home, opened, reach=reach, compute=compute, text=text)
            async for finding in swarm_findings(config, kept):
                report(finding)

    run_until_stopped(check_network)
    failures = [finding for finding in findings if finding.state == "failure"]
    if not as_json:
        failed = f"This machine cannot take part: {several(len(failures), 'check')} failed."
        say("", failed if failures else "This machine can take part.")
    raise click.exceptions.Exit(failures[0].exit_code if failures else 0)


def _show(finding: Finding) -> None:
    console = screen(wraps=False)
    console.print(Text.assemble(_MARKS[finding.state], f"  {finding.check:<11} {plain(finding.detail, LINE_MAX)}"))
    if finding.remedy:
        console.print(f"         {'':<11} -> {plain(finding.remedy)}")
