"""Checks of `peer doctor` over the network: port, addresses of the invite, admission, clock, reachability."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from statistics import median
from typing import Final

import trio
from libp2p.utils.address_validation import get_available_interfaces

from cli.checks.data_set import fetched_finding, folder_finding, is_data_set
from cli.checks.machine import Finding, State, disk_finding, disk_speed_finding, failure, memory_finding
from cli.checks.served_model import model_findings
from cli.checks.text import text_finding
from optim.config import StreamingConfig
from peer.errors import BarnraiseError, DialError
from peer.figures import duration_text, several, size_text
from peer.footprint.layout import Layout
from peer.footprint.pace import WAITING
from peer.machine import free_memory_bytes
from peer.net.address_book import is_circuit
from peer.net.host import Host
from peer.net.nat.reachability import Reachability, probe
from peer.net.reach import Reach
from peer.notifier import ask_at_once
from swarm.client.session import RunClient, client_host, open_client
from swarm.inference.record import run_schemas
from swarm.membership.reachability import CONNECT_S, DIAL_BACK, DialBackReply, DialBackRequest, tcp_ports
from swarm.placement.stages import group_most, leader_most
from swarm.protocol.agreement.round.attempt import SLOW_BITS_S
from swarm.run.bootstrap import ASK_SENDER, TELLING
from swarm.run.manifest import Manifest, ServedModelManifest
from swarm.run.peer_context import JoinConfig
from swarm.training.join_checks import check_text, disk_needs, footprints, own_needs, stages_in_files, written_a_round
from swarm.training.machine_memory import Accelerator, accelerator_of, layout_of

DIAL_S: Final = 8.0
PROBE_S: Final = 15.0
PROBED_MAX: Final = 4
_ASK: Final = f"check this machine's network; then {ASK_SENDER}"
CLOCK_WARNING_S: Final = 5.0  # records live for 9 s


async def port_finding(reach: Reach) -> Finding:
    """Check that the addresses can be listened on, and the announced ones can be announced."""
    try:
        async with client_host(reach) as host:
            published = ", published as" if reach.announce else ":"
            return Finding(
                "port", "ok", f"listening works{published} {', '.join(_bare(a, host) for a in host.addresses)}"
            )
    except BarnraiseError as error:
        return failure("port", error)


async def swarm_findings(config: JoinConfig, kept: Path | None) -> AsyncIterator[Finding]:
    """Check what needs the run's peers, for a peer with this `config`. `kept` is its home if that exists."""
    invite = config.invite
    async with client_host(config.reach) as host:
        found = [await _dial_finding(host, address) for address in invite.addresses]
    for finding in judged(found):
        yield finding
    if all(finding.state != "ok" for finding in found):
        return
    try:
        async with open_client(invite, kept, config.reach, run_schemas) as client:
            yield Finding("admission", "ok", f"run {client.manifest.name!r} admits this machine")
            if isinstance(client.manifest, ServedModelManifest):
                async for finding in model_findings(client):
                    yield finding
                yield clock_finding(client.node.clock_disagreement_s)
                yield await _reach_finding(client)
                return
            for finding in size_findings(client.training, config):
                yield finding
            async for finding in text_findings(client.training, config, client.tokenizer):
                yield finding
            members = await client.members()
            training = [peer for peer, record in members.items() if record.role in ("full", "stage")]
            yield members_finding(client.training, len(training))
            for finding in leader_findings(client.training, [members[peer].speed for peer in training]):
                yield finding
            yield clock_finding(client.node.clock_disagreement_s)
            paths = await _paths(client.host, training[:PROBED_MAX])
            yield await _reach_finding(client, paths)
            for path in paths:
                yield path_finding(path)
    except BarnraiseError as error:
        yield failure("admission", error)


def judged(found: Sequence[Finding]) -> list[Finding]:
    """Judge an invite's addresses together: one that fails is a warning if another answers. If none does, return one
    failure, with the most specific reason."""
    failed = [finding for finding in found if finding.state == "failure"]
    if len(failed) < len(found):
        remedy = "nothing to do: the invite works by its other addresses"
        return [f if f.state == "ok" else Finding(f.check, "warning", f.detail, remedy) for f in found]
    if not failed:
        return []
    reasons: dict[str, int] = {reason: rank for rank, reason in enumerate(TELLING)}
    telling = min(failed, key=lambda finding: reasons.get(finding.detail.partition(":")[0], -1))
    others = "" if len(failed) == 1 else f"; none of the {len(failed)} addresses of the invite answers"
    return [Finding(telling.check, "failure", f"{telling.detail}{others}", _ASK, telling.exit_code)]


def clock_finding(others_ahead_s: float) -> Finding:
    """Judge this machine's clock. `others_ahead_s`: by how much the median of the peers' clocks is ahead of it."""
    side = "behind" if others_ahead_s > 0 else "ahead of"
    detail = f"{abs(others_ahead_s):.1f} s {side} the peers' clocks"
    if abs(others_ahead_s) > CLOCK_WARNING_S:
        return Finding("clock", "warning", detail, "set this machine's clock, best by NTP (timedatectl set-ntp true)")
    return Finding("clock", "ok", detail)


def members_finding(manifest: Manifest, training: int) -> Finding:
    """Tell how many peers train, and for how many a group of the run has room."""
    most, each = group_most(manifest), "the group" if manifest.stages == 1 else "each stage"
    detail = f"{several(training, 'peer')} training; {each} has room for {most}"
    if training < most * manifest.stages:
        return Finding("members", "ok", detail)
    return Finding("members", "warning", detail, "join all the same: this peer is taken in once one has left")


def leader_findings(manifest: Manifest, speeds: Sequence[float]) -> Iterator[Finding]:
    """Tell what the leader of a full group sends besides its exchange, if the run has leaders; each peer leads in turn.
    `speeds`: of the peers that train, in steps a second. Where none is known yet, neither is the round's time."""
    known = [speed for speed in speeds if speed > 0]
    outer = manifest.outer
    steps = outer.steps / (outer.fragments if isinstance(outer, StreamingConfig) else 1)
    round_s = steps / median(known) if known else 0.0
    sent, most = leader_most(manifest, round_s), group_most(manifest)
    if not sent:
        return
    detail = f"of {most} peers sends {size_text(sent)} a round besides its exchange"
    if round_s:
        detail += f", {8 * sent / 1e6 / round_s:.2g} Mbit/s in rounds of {duration_text(round_s)}"
    if not round_s or 8 * sent / SLOW_BITS_S <= WAITING * round_s:
        yield Finding("leader", "ok", detail)
        return
    remedy = (
        f"join with more than {SLOW_BITS_S / 1e6:.0f} Mbit/s up; the next run needs a lower [run] max_peers or longer"
        " rounds"
    )
    yield Finding("leader", "warning", detail, remedy)


async def text_findings(manifest: Manifest, config: JoinConfig, tokenizer: bytes) -> AsyncIterator[Finding]:
    """Check what the run is to train on here: the text or the data set that the user names, else what comes without."""
    named = config.text.folder
    if named and (is_data_set(named) or manifest.data.pages is not None):
        yield await trio.to_thread.run_sync(folder_finding, Path(named), manifest)
    elif named:
        yield await text_finding(config.text, manifest, tokenizer)
    elif fetched := fetched_finding(manifest, config.home):
        yield fetched
    else:
        for finding in source_findings(manifest, config):
            yield finding


def source_findings(manifest: Manifest, config: JoinConfig) -> Iterator[Finding]:
    """Check that the run needs no text of the user's own: none is named."""
    try:
        check_text(config, manifest)
    except BarnraiseError as error:
        yield failure("text", error)


def size_findings(manifest: Manifest, config: JoinConfig) -> Iterator[Finding]:
    """Check that the run's model, or a stage of it, fits on this machine's disk and in its memory, and how its devices
    would share it."""
    found = accelerator_of(config, manifest)
    try:
        layout, in_files = layout_of(config, manifest), stages_in_files(config, manifest)
    except BarnraiseError as error:
        yield disk_finding(config.home, disk_needs(manifest, ""))
        yield failure("layout", error)
        return
    yield disk_finding(config.home, disk_needs(manifest, "", in_files))
    if in_files:
        yield disk_speed_finding(config.home, max(written_a_round(config, manifest, stage) for stage in in_files))
    if layout.size > 1:
        yield layout_finding(manifest, found, layout)
    yield memory_finding(free_memory_bytes(), own_needs(config, manifest, found, layout), bool(in_files))


def layout_finding(manifest: Manifest, found: Accelerator, layout: Layout) -> Finding:
    """Tell what each of several devices would hold."""
    most = max(sizes.device_bytes for sizes in footprints(manifest, found, layout=layout))
    what = "the model" if manifest.stages == 1 else "a stage"
    share = what if layout.parts == 1 else f"1/{layout.parts} of {what}"
    step = "the smallest step" if manifest.stages == 1 else "its rows of a micro-batch, in the largest stage"
    detail = f"{layout}: each device holds {share}, {most / 1e9:.2g} GB with {step}"
    return Finding("layout", "ok", detail)


def answers(reach: DialBackReply, asked: tuple[int, ...]) -> bool:
    """Whether a peer's report is about the ports that were asked for, and names an IP address if any."""
    with suppress(ValueError):
        ip_address(reach.seen_at or "0.0.0.0")
        return len(reach.outcomes) <= len(asked) and all(port in asked for port, _ in reach.outcomes)
    return False


def reach_finding(
    reach: DialBackReply | None, own: tuple[str, ...], *, punched: bool = False, relay: str = ""
) -> Finding:
    """Say which way this machine is reachable, and why not a better one. `reach`: what a peer says that tried to dial
    it, None for no peer; `own`: the IP addresses of its interfaces; `punched`: whether holes were punched to peers;
    `relay`: an address through a relay."""
    opened = [] if reach is None else [port for port, outcome in reach.outcomes if outcome == "open"]
    if reach is not None and opened:
        way = "direct" if reach.seen_at in own else "mapped port"
        return Finding("reachable", "ok", f"{way}: other peers dial {reach.seen_at} port {opened[0]}")
    why, remedy = _why_not_dialled(reach, own)
    if punched:
        return Finding(
            "reachable", "ok", f"punched: direct through holes in the NAT, where both sides try; {why}", remedy
        )
    if relay:
        return Finding("reachable", "ok", f"relayed: through {relay}; {why}", remedy)
    role = f"client: {why}. It takes part all the same: it dials other peers, and merges nothing"
    return Finding("reachable", "warning", why if reach is None else role, remedy)


def _why_not_dialled(reach: DialBackReply | None, own: tuple[str, ...]) -> tuple[str, str]:
    """Return why other peers cannot just dial this machine, and what to do about it."""
    if reach is None:
        return "no peer could test whether others can dial this machine", "try again when the run has members"
    if not reach.seen_at:
        return "the peers that were asked see it only through a relay", "forward a TCP port to it for speed"
    behind = "" if reach.seen_at in own else f"behind NAT (others see it at {reach.seen_at}), "
    tried = ", ".join(f"port {port} {outcome}" for port, outcome in reach.outcomes)
    return (
        f"{behind}other peers cannot dial this machine ({tried})",
        "try --map-port, or forward that port and name it with --announce, open it in the firewall, or use --relay",
    )


async def _dial_finding(host: Host, address: str) -> Finding:
    try:
        await host.connect_address(address, timeout_s=DIAL_S)
    except DialError as error:
        found = failure("bootstrap", error)
        return Finding("bootstrap", "failure", f"{error.reason}: {found.detail}", found.remedy, error.exit_code)
    except BarnraiseError as error:
        return failure("bootstrap", error)
    return Finding("bootstrap", "ok", address)


async def _paths(host: Host, peers: list[str]) -> list[Reachability]:
    """Find the kind of path to each of these peers."""
    return await ask_at_once(lambda peer: probe(host, peer, timeout_s=PROBE_S), peers)


def path_finding(path: Reachability) -> Finding:
    """Judge the path to one peer."""
    state: State = "failure" if path.kind == "unreachable" else "warning" if path.kind == "relayed" else "ok"
    remedy = "" if state == "ok" else "give --relay MULTIADDR on both machines, or forward a TCP port"
    return Finding("path", state, f"{path.kind}: {path.detail}", remedy, 3 if state == "failure" else 0)


async def _reach_finding(client: RunClient, paths: Sequence[Reachability] = ()) -> Finding:
    """Ask the connected peers to dial this machine. One on this machine itself counts only if there is no other."""
    host = client.host
    ports = tcp_ports(address for address in host.addresses if not is_circuit(address))
    relayed = [address for address in host.addresses if is_circuit(address)]
    reach: DialBackReply | None = None
    for peer in host.connected:
        try:
            reply = await host.rpc.call(peer, DIAL_BACK, DialBackRequest(ports), timeout_s=2 * CONNECT_S)
        except BarnraiseError:
            continue
        if not answers(reply.body, ports):
            continue
        reach = reply.body
        is_open = any(outcome == "open" for _, outcome in reach.outcomes)
        if is_open or not ip_address(reach.seen_at or "0.0.0.0").is_loopback:
            break
    punched = any(path.kind == "hole-punched" for path in paths)
    return reach_finding(reach, interface_ips(), punched=punched, relay=relayed[0] if relayed else "")


def interface_ips() -> tuple[str, ...]:
    """Return the IP addresses of this machine, also those that are not announced."""
    found = [str(address).split("/")[2] for address in get_available_interfaces(0)]
    return (*found, "127.0.0.1", "::1")


def _bare(address: str, host: Host) -> str:
    return address.removesuffix(f"/p2p/{host.peer_id}")
