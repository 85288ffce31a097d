"""The status of a served model on a terminal: its servers, who holds which blocks, and what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cli.terminal.screen import screen
from cli.views.text import NOTHING, several, size_text
from peer.plain_text import plain

if TYPE_CHECKING:
    from swarm.inference.model_status import BlockStatus, ServedModelStatus, ServerStatus

_SERVERS = ("server", "id", "blocks", "state", "sessions", "room", "waiting", "step", "tokens", "up / down", "seen")
_LEFT = ("server", "id", "blocks", "state", "servers")


def show_served_model(seen: ServedModelStatus) -> None:
    """Print the status."""
    console = screen(width=max(100, screen().width))
    admission = "open" if seen.open else "by invitation"
    console.print(Text(plain(seen.name), style="bold"), f"  served model {seen.run_id}  ", admission)
    console.print(f"{several(seen.blocks, 'block')} in {seen.dtype}, a checkpoint of {several(seen.parts, 'part')}")
    if seen.servers:
        console.print(_table(_SERVERS, [_server_cells(server) for server in seen.servers]))
        console.print(_table(("blocks", "state", "servers"), [_block_cells(part) for part in seen.coverage]))
    for trouble in seen.troubles:
        console.print(Text(trouble, style="red"))
    if not seen.troubles:
        console.print(f"All {several(seen.blocks, 'block')} are served.")


def _table(columns: tuple[str, ...], lines: list[list[Text | str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=column != "servers")
    for cells in lines:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def _server_cells(server: ServerStatus) -> list[Text | str]:
    state = f"ready in {server.ready_in_s:.0f} s" if server.state == "arriving" else server.state
    return [
        plain(server.name[:16]),
        server.peer[-6:],
        f"{server.first}-{server.end - 1}",
        Text(state, style="" if server.state == "held" else "yellow"),
        str(server.sessions),
        f"{100 * server.pages_free // server.pages} %" if server.pages else NOTHING,
        str(server.waiting_tokens),
        f"{server.step_ms:.1f} ms" if server.step_ms else NOTHING,
        str(server.tokens),
        f"{size_text(server.bytes_up)} / {size_text(server.bytes_down)}",
        f"{server.age_s:.0f} s",
    ]


def _block_cells(part: BlockStatus) -> list[Text | str]:
    blocks = str(part.first) if part.end == part.first + 1 else f"{part.first}-{part.end - 1}"
    names = ", ".join(plain(name[:16]) for name in part.servers) or NOTHING
    return [blocks, Text(part.state, style="" if part.state == "held" else "red"), names]
