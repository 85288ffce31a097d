"""The monitor's state on a terminal: verdict, stages or blocks, members, rounds and log, in so many lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.text import Text

from cli.views.columns import table_lines
from cli.views.data_set import holders_text, progress_text
from cli.views.kept_home import kept_lines
from cli.views.members import member_cells, server_cells
from peer.catalogue.happening import LOWER_RATE
from peer.figures import NOTHING, held_out_text, several
from peer.plain_text import plain

if TYPE_CHECKING:
    from swarm.status.state import MemberClaims, MonitorState, RoundState, Verdict

_STYLES: Final = {"good": "green", "over": "green", "edge": "yellow", "waiting": "yellow", "bad": "bold red"}
_BASIS: Final = {"facts": "proved", "seen": "seen", "claims": "claimed"}
_ALERTS: Final = 3
_SEVERITIES: Final = {"critical": "bold red", "warning": "yellow", "info": ""}


def monitor_view(state: MonitorState, width: int, height: int | None = None, guests: bool = False) -> Group:
    """Return the view, in at most `height` lines of at most `width` columns if that is given. `guests`: with who came
    by which invite."""
    width = max(20, width)
    top = [_title(state), *_verdict(state.verdict, width), *_alert_lines(state, width, height is None)]
    if state.home is not None:
        top += [Text(line) for line in kept_lines(state.home, time.time())]
    top += [Text(line) for line in (_model_text(state) if state.kind == "model" else _progress(state)) if line]
    stages = _block_lines(state) if state.kind == "model" else _stage_lines(state, width)
    rounds, log = _round_lines(state), _log_lines(state)
    members = [*_member_lines(state, width), *_remarks(state), *(_guest_lines(state) if guests else ())]
    if height is None:
        return Group(*top, *stages, *members, *rounds, *log)
    room = max(0, height - len(top))
    # Each part keeps a little; members get what is left.
    least = [min(len(stages), 5), min(len(rounds), 4), min(len(log), 4)]
    for_members = max(0, room - sum(least))
    shown_members = _cut(members, for_members)
    spare = max(0, room - sum(least) - len(shown_members))
    parts = [_cut(stages, least[0] + spare)]
    spare = max(0, spare - max(0, len(parts[0]) - least[0]))
    parts += [shown_members, _cut(rounds, least[1] + spare // 2)]
    spare = max(0, spare - max(0, len(parts[2]) - least[1]))
    parts.append(_cut(log, least[2] + spare))
    lines = [*top, *(line for part in parts for line in part)][:height]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _title(state: MonitorState) -> Text:
    what = {"run": "run", "model": "served model", "unknown": "not reached"}[state.kind]
    watch = state.monitor
    ago = "never" if watch.last_success is None else f"{max(0.0, time.time() - watch.last_success):.0f} s ago"
    admission = "" if state.kind == "unknown" else "open  " if state.open else "by invitation  "
    title = Text(plain(state.name, 30) or "barnraise", style="bold")
    return title.append(f"  {what} {state.run_id[:12]}  {admission}read {ago}", style="not bold")


def _progress(state: MonitorState) -> list[str]:
    """Return how far the run is: what is committed, the last held-out loss, and for a whole model the state's hash."""
    if state.round is None:
        return []
    of = f" of {state.rounds_planned}" if state.rounds_planned else ""
    parts = [f"round {state.round}{of}", f"{state.tokens / 1e6:.1f} M tokens"]
    if state.val_loss is not None:
        parts.append(f"held-out loss {held_out_text(state.val_loss, state.val_round)}")
    if len(state.stages) == 1 and (facts := state.stages[0].facts) is not None and facts.round == state.round:
        parts.append(f"state {facts.state_hash[:8]}")
    return [", ".join(parts), *([progress_text(state.data_set)] if state.data_set is not None else [])]


def _model_text(state: MonitorState) -> list[str]:
    return [f"{several(state.blocks_total, 'block')} in {state.dtype}, a checkpoint of {several(state.parts, 'part')}"]


def _verdict(verdict: Verdict, width: int) -> list[Text]:
    """Return the verdict, its reason and its remedy in at most five lines."""
    basis = ", ".join(_BASIS[kind] for kind in verdict.basis)
    lines = _folded(f"{verdict.word.upper()}  {verdict.reason} ({basis})", width)[:3]
    styled = [Text(line, style=_STYLES.get(verdict.level, "")) for line in lines]
    return styled + [Text(line) for line in _folded(f"-> {verdict.remedy}", width)[:2] if verdict.remedy]


def _alert_lines(state: MonitorState, width: int, all_of_them: bool) -> list[Text]:
    """Return the gravest alerts, each with its remedy in at most two lines, and where help is wanted."""
    alerts = [alert for alert in state.alerts if alert.text != state.verdict.reason]
    lines, most = list[Text](), len(alerts) if all_of_them else _ALERTS
    for alert in alerts[:most]:
        folded = _folded(f"{alert.severity}: {alert.text} -> {alert.remedy}", width)[:2]
        lines += [Text(line, style=_SEVERITIES[alert.severity]) for line in folded]
    if len(alerts) > most:
        lines.append(Text(f"and {several(len(alerts) - most, 'alert')} more"))
    if state.help_wanted and state.verdict.level not in ("over", "unknown"):
        lines += [Text(line) for line in _folded(f"most help: {state.help_wanted}", width)[:2]]
    return lines


def _folded(text: str, width: int) -> list[str]:
    lines, line = list[str](), ""
    for word in plain(text, 400).split(" "):
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _stage_lines(state: MonitorState, width: int) -> list[Text]:
    rows = []
    for stage in state.stages:
        facts, seen, claims = stage.facts, stage.seen, stage.claims
        cells = {
            "stage": str(stage.stage),
            "blocks": f"{stage.first}-{stage.end - 1}",
            "round": str(facts.round) if facts else NOTHING,
            "here/members": f"{seen.answering}/{facts.members}" if facts else NOTHING,
            "quorum": str(facts.quorum) if facts else NOTHING,
            "margin": NOTHING if seen.margin is None else str(seen.margin),
            "repl.": f"{claims.replicas}" + (f"+{claims.arriving}" if claims.arriving else ""),
            "batch/s": f"{claims.rate:.1f}" if len(state.stages) > 1 else NOTHING,
            "queue": NOTHING if claims.queue is None else f"{claims.queue:.1f}",
            "phase": plain(claims.phase, 64) if claims.replicas else "not served",
        }
        bad = seen.margin is not None and seen.margin < 0 and state.verdict.level != "over"
        rows.append((cells, "red" if bad else ""))
    return table_lines(rows, width)


def _block_lines(state: MonitorState) -> list[Text]:
    if not state.blocks:
        return []
    lines = [Text(f"{'blocks':>9} {'servers':>7} {'arriving':>8} {'leaving':>7}  who (claimed)", style="bold")]
    for row in state.blocks:
        who = ", ".join(_name(state, peer) for peer in row.peers[:4])
        text = f"{f'{row.first}-{row.end - 1}':>9} {row.servers:>7} {row.arriving:>8} {row.leaving:>7}  {who}"
        lines.append(Text(text, style="" if row.servers else "red"))
    return lines


def _member_lines(state: MonitorState, width: int) -> list[Text]:
    """Return the table of the peers, and below it that of a run's servers."""
    cells = server_cells if state.kind == "model" else partial(member_cells, data_set=state.data_set)
    over = state.verdict.level == "over"
    lines = table_lines(
        [(cells(one), "red" if one.claims is None and not over else "") for one in state.members], width
    )
    if state.monitor.members_left_out:
        lines.append(Text(f"and {several(state.monitor.members_left_out, 'peer')} that are not shown"))
    lines += table_lines([(server_cells(one), "") for one in state.servers], width)
    if state.served_round is not None:
        lines.append(Text(f"New answers are those of round {state.served_round}."))
    what = "No commit is served: " if state.kind == "run" else ""
    return lines + [Text(f"{what}{trouble}", style="red") for trouble in state.troubles]


def _remarks(state: MonitorState) -> list[Text]:
    """Return what else there is to say of peers: by their own words, and by others'."""
    lines = list[Text]()
    for member in state.members:
        claims = member.claims
        if claims is None:
            continue
        name = plain(claims.name, 64)
        if claims.stage is not None and claims.ready_in_s > 0:
            way = "joining" if claims.source is None else f"moving from stage {claims.source} to"
            lines.append(Text(f"{name} is {way} stage {claims.stage}, ready in about {claims.ready_in_s:.0f} s"))
        if claims.skipped:
            lines.append(Text(_skipped_text(name, claims), style="red" if claims.skipped == claims.steps else ""))
    here = [member.claims for member in state.members if member.claims is not None]
    if feeders := [plain(claims.name, 64) for claims in here if claims.role == "feeder"]:
        lines.append(Text(f"text is read by {', '.join(feeders)}"))
    if clients := [plain(claims.name, 64) for claims in here if claims.client]:
        lines.append(
            Text(f"{', '.join(clients)} cannot be dialled: {'they merge' if clients[1:] else 'it merges'} nothing")
        )
    if state.silent:
        silent = ", ".join(_name_and_id(state, peer, "the coordinator") for peer in state.silent)
        lines.append(Text(f"no answer from {silent}", style="yellow"))
    if state.data_set is not None and state.verdict.level != "over":
        lines.append(Text(holders_text(state.data_set), style="yellow" if state.data_set.unkept else ""))
    texts = [*_judged_texts(state), *(f"{plain(caution)}." for caution in state.cautions)]
    return lines + [Text(text, style="yellow") for text in texts]


def _skipped_text(name: str, claims: MemberClaims) -> str:
    """Return what a peer's skipped steps mean for the run."""
    which = "all" if claims.skipped == claims.steps else f"{claims.skipped} of"
    return (
        f"{name} skipped {which} {several(claims.steps, 'step')} of its last round, whose loss or gradient was NaN or"
        f" infinite: {LOWER_RATE}"
    )


def _judged_texts(state: MonitorState) -> list[str]:
    """Return whose updates make the loss worse, by the word of the members that answered."""
    if state.judges == 0 and any(stage.facts is not None and stage.facts.members for stage in state.stages):
        return ["no member answered whose updates make the loss worse"]
    of, texts = several(state.judges or 0, "member"), []
    for judged in state.judged:
        says, leave = len(judged.judges), len(judged.left_out_by)
        who = _name_and_id(state, judged.peer, "away")
        text = f"{who} makes the loss worse, {'says' if says == 1 else 'say'} {says} of {of} that answered"
        lead = "leaves it out where it leads" if leave == 1 else "leave it out where they lead"
        texts.append(text + (f"; {leave} {lead}" if leave else ""))
    return texts


def _guest_lines(state: MonitorState) -> list[Text]:
    """Return who came by which invite, directly or through a member that came by it, and what that means for votes."""
    from swarm.membership.vote_shares import caution

    lines = list[Text]()
    if not state.guests:
        why = "this run is open" if state.open else "no peer came by one yet"
        lines.append(Text(f"No invite has brought in a peer: {why}."))
    for invite in state.guests:
        peers = ", ".join(_name_and_id(state, peer, "away") for peer in invite.peers)
        came = f"{len(invite.peers)} of {several(invite.guests, 'guest')}, {several(invite.members, 'member')}"
        lines.append(Text(f"invite {plain(invite.invite[:8])}  {came}: {peers}"))
    return lines + [Text(f"{plain(caution(share))}.") for share in state.shares if share.is_only]


def _name_and_id(state: MonitorState, peer: str, unknown: str) -> str:
    return f"{plain(state.names.get(peer, unknown), 64)} {peer[-6:]}"


def _round_lines(state: MonitorState) -> list[Text]:
    lines = [Text("last rounds (proved)", style="bold")] if state.rounds else []
    return lines + [Text(_round_text(state, made)) for made in state.rounds]


def _round_text(state: MonitorState, made: RoundState) -> str:
    facts = made.facts
    of = f" of stage {made.stage}" if len(state.stages) > 1 else ""
    if made.starts_term:
        return f"term {made.term}{of} began after round {made.round} with {several(facts.members, 'member')}"
    text = f"round {made.round}{of}: {len(facts.took_part)} took part"
    if facts.absent:
        text += f", absent {', '.join(_name(state, peer) for peer in facts.absent[:4])}"
    if facts.discarded:
        text += f", {several(facts.discarded, 'attempt')} discarded"
    if made.claims.last and made.claims.behind_s >= 1:
        text += f"; last {_name(state, made.claims.last)}, {made.claims.behind_s:.0f} s behind (claimed)"
    return text


def _log_lines(state: MonitorState) -> list[Text]:
    lines = [Text("events (claimed)", style="bold")] if state.log else []
    for line in state.log:
        more = f" ({len(line.tellers)} say so)" if len(line.tellers) > 1 else ""
        lines.append(Text(f"{time.strftime('%H:%M:%S', time.localtime(line.at))} {plain(line.text, 160)}{more}"))
    return lines


def _name(state: MonitorState, peer: str) -> str:
    return plain(state.names.get(peer) or f"…{peer[-6:]}", 16)


def _cut(lines: Sequence[Text], most: int) -> list[Text]:
    """Return the first lines; a heading alone is left out."""
    return list(lines[:most]) if most > 1 or len(lines) <= most else []
