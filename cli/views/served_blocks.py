"""What `peer serve` shows while it runs: how far the weights have come, then who uses the blocks."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from cli.progress.served_blocks import LoadingPhase, ServedBlocks
from cli.terminal.fact_lines import FactLines, Part, bar
from peer.figures import duration_text, several, size_text


def served_blocks_view(seen: ServedBlocks, width: int) -> RenderableType:
    """Return the lines, which fit themselves to the terminal."""
    title = f"{seen.name}   {seen.title}" if seen.name else seen.title
    lines = FactLines(lambda ascii_only: served_blocks_lines(seen, ascii_only))
    return Group(Text(title, style="italic", no_wrap=True, overflow="ellipsis"), Text(), lines)


def served_blocks_lines(seen: ServedBlocks, ascii_only: bool = False) -> list[tuple[str, list[Part]]]:
    """Return the labels and facts, the most important of each line first."""
    lines: list[tuple[str, list[Part]]] = []
    if seen.span is not None:
        first, end = seen.span
        of = f" of {seen.blocks}" if seen.blocks else ""
        lines.append(("now", [f"serving {several(end - first, 'block')}{of}", f"{first} to {end - 1}"]))
    if seen.loading is not None:
        row = seen.loading
        lines.append(("next" if lines else "now", [row.doing.lower(), bar(row.share, ascii_only)]))
        lines.append(("bytes", _bytes(row, seen.now())))
    elif not lines:
        lines.append(("now", ["starting" if seen.served_at is None else "moving to other blocks"]))
    if seen.served_at is None:
        return lines
    load = seen.load
    users = [several(load.sessions, "session"), several(load.clients, "client")]
    lines.append(("use", [*users, f"{several(load.waiting_tokens, 'token')} waiting"]))
    speed: list[Part] = [f"{seen.tokens_per_s:,.1f} tokens/s", f"{load.tokens:,} tokens so far"]
    lines.append(("speed", [*speed, f"{load.step_ms:.1f} ms a step"] if load.step_ms else speed))
    if pages := load.pages:
        free = load.pages_free
        lines.append(("room", [f"{100 * free // pages} % free", f"{free:,} of {pages:,} pages of 16 tokens"]))
    up: list[Part] = [duration_text(float(int(seen.now() - seen.served_at)))]
    lines.append(("up", [*up, several(seen.moves, "move")] if seen.moves else up))
    if seen.address:
        lines.append(("address", [seen.address]))
    if seen.short:
        lines.append(
            ("try", [f"peer chat {seen.short}", f"peer api {seen.short}", f'peer generate {seen.short} "..."'])
        )
    return lines


def _bytes(row: LoadingPhase, now: float) -> list[Part]:
    """Return how much is done, how fast, and what is left."""
    parts: list[Part] = [f"{size_text(row.done)} of {size_text(row.size)}"]
    rate, left_s = row.per_s, row.left_s(now)
    if rate is not None and left_s is not None:
        parts += [f"{size_text(rate)}/s", f"{duration_text(float(round(left_s)))} left"]
    return parts
