"""What `peer plan --serve` shows on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cli.terminal.screen import table_screen
from peer.figures import several, size_text

if TYPE_CHECKING:
    from swarm.serving.memory import ServingPlan

_COLUMNS: Final = 80


def show_serving_plan(plan: ServingPlan) -> None:
    """Print the bytes by item, and how many blocks the machine serves."""
    console = table_screen(_COLUMNS)
    table = Table("what", "type", "bytes", box=SIMPLE_HEAD, header_style="")
    ends = plan.dtype
    for what, kind, size in (
        ("embedding", ends, plan.embedding_bytes),
        (several(plan.layers, "block"), plan.quantization or ends, plan.blocks_bytes),
        ("head", ends, plan.head_bytes),
    ):
        table.add_row(what, kind, size_text(size))
    whole = plan.embedding_bytes + plan.blocks_bytes + plan.head_bytes
    table.add_row(Text("together", style="bold"), "", size_text(whole))
    table.add_row("keys and values of a token", ends, size_text(plan.token_bytes))
    console.print(table)
    where = "memory" if plan.device == "cpu" else "the GPU's memory"
    console.print(f"{size_text(plan.memory_bytes)} of {where} are for weights and caches (`peer serve --memory`).")
    if not plan.blocks_that_fit:
        console.print(Text.assemble("It ", ("does not fit", "red"), ": not even one block, beside embedding and head."))
        return
    console.print(f"Beside the weights there is room for {plan.tokens_kept} tokens of all sessions together.")
    if plan.fits:
        console.print(Text.assemble("One such machine ", ("serves the whole model", "green"), "."))
    else:
        console.print(
            f"One such machine serves {plan.blocks_that_fit} of {several(plan.layers, 'block')};"
            f" {plan.servers} of them serve the whole model."
        )
    if plan.quantization == "nf4" and plan.device == "cpu":
        console.print("A CPU decodes nf4 for each product: expect a fraction of fp32's speed (docs/run/serving.md).")
