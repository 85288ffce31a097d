"""The status of a served model, and of those that serve a run, on a terminal: the servers, who holds which blocks, and
what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from cli.terminal.figures import NOTHING, several, size_text
from cli.terminal.screen import table_screen
from cli.views.table import fitting
from peer.plain_text import plain

if TYPE_CHECKING:
    from swarm.inference.model_status import BlockStatus, ServedModelStatus, ServedRunStatus, ServerStatus

_SOON_S: Final = 600.0  # what a server of a run says that waits for a commit is no forecast
_SERVERS = ("server", "id", "blocks", "state", "sessions", "room", "waiting", "step", "tokens", "up / down", "seen")
_RUN_SERVERS = ("server", "id", "blocks", "rounds", "state", "sessions", "room", "step", "tokens", "seen")
_FIRST_TO_GO: Final = ("up / down", "seen", "id", "tokens", "waiting", "room", "step")
"""What a narrow terminal does not show."""
_SERVERS_LEAST: Final = 20  # of the column that wraps
_LEFT = ("server", "id", "blocks", "state", "servers")


def show_served_model(seen: ServedModelStatus) -> None:
    """Print the status."""
    console = table_screen()
    admission = "open" if seen.open else "by invitation"
    console.print(Text(plain(seen.name), style="bold"), f"  served model {seen.run_id}  ", admission)
    console.print(f"{several(seen.blocks, 'block')} in {seen.dtype}, a checkpoint of {several(seen.parts, 'part')}")
    if seen.servers:
        console.print(_table(_SERVERS, [_server_cells(server, _SERVERS) for server in seen.servers]))
        console.print(_table(("blocks", "state", "servers"), [_block_cells(part) for part in seen.coverage]))
    for trouble in seen.troubles:
        console.print(Text(trouble, style="red"))
    if not seen.troubles:
        console.print(f"All {several(seen.blocks, 'block')} are served.")


def show_run_servers(seen: ServedRunStatus) -> None:
    """Print who serves a run's commits; nothing if no peer does."""
    if not seen.servers:
        return
    console = table_screen()
    console.print(_table(_RUN_SERVERS, [_server_cells(server, _RUN_SERVERS) for server in seen.servers]))
    for trouble in seen.troubles:
        console.print(Text(f"No commit is served: {trouble}", style="red"))
    if seen.served_round is not None:
        console.print(f"New answers are those of round {seen.served_round}.")


def _table(columns: tuple[str, ...], lines: list[list[Text | str]]) -> Table:
    """Return a table with as many columns as the terminal shows whole."""
    widths = {
        column: max([len(column), *(cell_len(str(cells[at])) for cells in lines)]) for at, column in enumerate(columns)
    }
    shown = fitting(columns, widths | {"servers": _SERVERS_LEAST}, table_screen().width, _FIRST_TO_GO)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=column != "servers")
    for cells in lines:
        pairs = zip(columns, cells, strict=True)
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for column, cell in pairs if column in shown))
    return table


def _server_cells(server: ServerStatus, columns: Sequence[str]) -> list[Text | str]:
    soon = server.state == "arriving" and server.ready_in_s < _SOON_S
    state = f"ready in {server.ready_in_s:.0f} s" if soon else server.state
    cells: dict[str, Text | str] = {
        "server": plain(server.name[:16]),
        "id": server.peer[-6:],
        "blocks": f"{server.first}-{server.end - 1}",
        "rounds": ", ".join(map(str, server.rounds)) or NOTHING,
        "state": Text(state, style="" if server.state == "held" else "yellow"),
        "sessions": str(server.sessions),
        "room": f"{100 * server.pages_free // server.pages} %" if server.pages else NOTHING,
        "waiting": str(server.waiting_tokens),
        "step": f"{server.step_ms:.1f} ms" if server.step_ms else NOTHING,
        "tokens": str(server.tokens),
        "up / down": f"{size_text(server.bytes_up)} / {size_text(server.bytes_down)}",
        "seen": f"{server.age_s:.0f} s",
    }
    return [cells[column] for column in columns]


def _block_cells(part: BlockStatus) -> list[Text | str]:
    blocks = str(part.first) if part.end == part.first + 1 else f"{part.first}-{part.end - 1}"
    names = ", ".join(plain(name[:16]) for name in part.servers) or NOTHING
    return [blocks, Text(part.state, style="" if part.state == "held" else "red"), names]
