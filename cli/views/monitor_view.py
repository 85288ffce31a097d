"""The monitor's state on a terminal: verdict, stages or blocks, members, rounds and log, in so many lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.text import Text

from cli.terminal.figures import NOTHING, number_text, several, size_text
from cli.views.kept_home import kept_lines
from peer.plain_text import plain

if TYPE_CHECKING:
    from swarm.monitor.state import MemberState, MonitorState, RoundState, Verdict

_STYLES: Final = {"good": "green", "over": "green", "edge": "yellow", "waiting": "yellow", "bad": "bold red"}
_BASIS: Final = {"facts": "proved", "seen": "seen", "claims": "claimed"}
_AWAY: Final = "away"
_ALERTS: Final = 3
_SEVERITIES: Final = {"critical": "bold red", "warning": "yellow", "info": ""}


def monitor_view(state: MonitorState, width: int, height: int) -> Group:
    """Return the view in at most `height` lines of at most `width` columns."""
    width = max(20, width)
    top = [_title(state), *_verdict(state.verdict, width), *_alert_lines(state, width)]
    if state.home is not None:
        top += [Text(line) for line in kept_lines(state.home, time.time())]
    stages = _block_lines(state) if state.kind == "model" else _stage_lines(state)
    rounds, log = _round_lines(state), _log_lines(state)
    members = _member_lines(state)
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
    title = Text(plain(state.name, 30) or "barnraise", style="bold")
    return title.append(f"  {what} {state.run_id[:12]}  read {ago}", style="not bold")


def _verdict(verdict: Verdict, width: int) -> list[Text]:
    """Return the verdict, its reason and its remedy in at most five lines."""
    basis = ", ".join(_BASIS[kind] for kind in verdict.basis)
    lines = _folded(f"{verdict.word.upper()}  {verdict.reason} ({basis})", width)[:3]
    styled = [Text(line, style=_STYLES.get(verdict.level, "")) for line in lines]
    return styled + [Text(line) for line in _folded(f"-> {verdict.remedy}", width)[:2] if verdict.remedy]


def _alert_lines(state: MonitorState, width: int) -> list[Text]:
    """Return the gravest alerts, each with its remedy in at most two lines, and where help is wanted."""
    lines = list[Text]()
    for alert in state.alerts[:_ALERTS]:
        folded = _folded(f"{alert.severity}: {alert.text} -> {alert.remedy}", width)[:2]
        lines += [Text(line, style=_SEVERITIES[alert.severity]) for line in folded]
    if len(state.alerts) > _ALERTS:
        lines.append(Text(f"and {several(len(state.alerts) - _ALERTS, 'alert')} more"))
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


def _stage_lines(state: MonitorState) -> list[Text]:
    if not state.stages:
        return []
    heads = (
        f"{'stage':>5} {'blocks':>7} {'round':>7} {'here/members':>12} {'quorum':>6} {'margin':>6} {'repl.':>6} phase"
    )
    lines = [Text(heads, style="bold")]
    for stage in state.stages:
        facts, seen, claims = stage.facts, stage.seen, stage.claims
        here = f"{seen.answering}/{facts.members}" if facts else NOTHING
        replicas = f"{claims.replicas}" + (f"+{claims.arriving}" if claims.arriving else "")
        margin = NOTHING if seen.margin is None else str(seen.margin)
        text = (
            f"{stage.stage:>5} {f'{stage.first}-{stage.end - 1}':>7} {facts.round if facts else NOTHING:>7}"
            f" {here:>12} {facts.quorum if facts else NOTHING:>6} {margin:>6} {replicas:>6} {plain(claims.phase, 24)}"
        )
        bad = seen.margin is not None and seen.margin < 0 and state.verdict.level != "over"
        lines.append(Text(text, style="red" if bad else ""))
    return lines


def _block_lines(state: MonitorState) -> list[Text]:
    if not state.blocks:
        return []
    lines = [Text(f"{'blocks':>9} {'servers':>7} {'arriving':>8} {'leaving':>7}  who (claimed)", style="bold")]
    for row in state.blocks:
        who = ", ".join(_name(state, peer) for peer in row.peers[:4])
        text = f"{f'{row.first}-{row.end - 1}':>9} {row.servers:>7} {row.arriving:>8} {row.leaving:>7}  {who}"
        lines.append(Text(text, style="" if row.servers else "red"))
    return lines


def _member_lines(state: MonitorState) -> list[Text]:
    if not state.members:
        return []
    if state.kind == "model":
        heads = f"{'peer':<16} {'id':>6} {'blocks':>7} {'sess.':>5} {'kv':>4} {'ms':>6} {'up/s':>8} {'down/s':>8} phase"
    else:
        heads = (
            f"{'peer':<16} {'id':>6} {'in':<3} {'merged':>6} {'speed':>6} {'loss':>6} {'up/s':>8} {'down/s':>8} phase"
        )
    lines = [Text(heads, style="bold")]
    for member in state.members:
        text = _server_cells(member) if state.kind == "model" else _member_cells(member)
        lines.append(Text(text, style="red" if member.claims is None and state.verdict.level != "over" else ""))
    if state.monitor.members_left_out:
        lines.append(Text(f"and {several(state.monitor.members_left_out, 'peer')} that are not shown"))
    return lines


def _member_cells(member: MemberState) -> str:
    claims, facts = member.claims, member.facts
    place = {"member": "yes", "learner": "new", "none": NOTHING}[facts.membership]
    merged = f"{facts.merged}/{facts.merged + facts.missed}" if facts.merged + facts.missed else NOTHING
    if claims is None:
        return f"{NOTHING:<16} {member.peer[-6:]:>6} {place:<3} {merged:>6} {_AWAY:>6}"
    stage = "" if claims.stage is None else f"stage {claims.stage}, "
    speed = NOTHING if not claims.speed else f"{claims.speed:.1f}"
    return (
        f"{plain(claims.name, 16):<16} {member.peer[-6:]:>6} {place:<3} {merged:>6} {speed:>6}"
        f" {number_text(claims.loss):>6} {_rate(claims.up_bytes_s):>8} {_rate(claims.down_bytes_s):>8}"
        f" {stage}{plain(claims.phase, 24)}{_trouble(member)}"
    )


def _server_cells(member: MemberState) -> str:
    claims = member.claims
    if claims is None or claims.first is None or claims.end is None:
        return f"{NOTHING:<16} {member.peer[-6:]:>6} {_AWAY:>7}"
    kv = NOTHING if claims.kv_used is None else f"{claims.kv_used:.0%}"
    step = NOTHING if claims.step_ms is None else f"{claims.step_ms:.1f}"
    return (
        f"{plain(claims.name, 16):<16} {member.peer[-6:]:>6} {f'{claims.first}-{claims.end - 1}':>7}"
        f" {claims.sessions or 0:>5} {kv:>4} {step:>6} {_rate(claims.up_bytes_s):>8} {_rate(claims.down_bytes_s):>8}"
        f" {claims.phase}{_trouble(member)}"
    )


def _trouble(member: MemberState) -> str:
    return {"silent": ", silent", "garbage": ", answers nonsense"}.get(member.seen.events, "")


def _rate(bytes_s: float | None) -> str:
    return NOTHING if bytes_s is None else size_text(bytes_s)


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
