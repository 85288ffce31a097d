"""What `peer plan` shows on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cli.terminal.screen import table_screen
from peer.figures import several, size_text

if TYPE_CHECKING:
    from swarm.pages.sizes import DataSetPlan
    from swarm.placement.machine_plan import MachinePlan, StageNeed

_TWICE: Final = {"none": "nothing", "selective": "all but its matrix products", "full": "all"}
_COLUMNS: Final = 80
_PLACES: Final = ("device", "host", "disk")


def show_plan(plan: MachinePlan, data_set: DataSetPlan | None = None) -> None:
    """Print the plan: the bytes by item, the pace, the data set, what would help, and last whether it fits."""
    console = table_screen(_COLUMNS)
    verdict = Text("fits", style="green") if plan.fits else Text("does not fit", style="red")
    where = f"{size_text(plan.host_memory_bytes)} of memory"
    if plan.device != "cpu":
        devices = "a device" if plan.devices == 1 else f"{plan.devices} devices"
        where = f"{devices} of {size_text(plan.device_memory_bytes)} and {where}"
    if plan.devices > 1:
        where = f"{where}, in the layout {plan.layout}"
    console.print(Text.assemble(f"{plan.parameters / 1e6:.1f} million parameters: ", verdict, f" on {where}"))
    largest = max(plan.stages, key=lambda need: need.host_bytes + need.device_bytes)
    if len(plan.stages) > 1:
        does = "".join(f" {need.stage}" for need in plan.stages if need.fits) or " none"
        console.print(
            f"{several(len(plan.stages), 'stage')}; those that fit:{does}; below the largest, {largest.stage}"
        )
    console.print(_items(plan, largest))
    console.print(_pace(plan))
    if data_set is not None:
        console.print(_data_set(data_set))
    for line in plan.advice:
        console.print(f"- {line}.")
    end = "." if plan.fits else ". The lines above say what helps."
    console.print(Text.assemble("It ", verdict, "; bottleneck: ", (plan.bottleneck, "bold"), end))


def _items(plan: MachinePlan, need: StageNeed) -> Table:
    table = _table("where", "what", "bytes", "a parameter")
    for place in _PLACES:
        items: dict[str, float] = getattr(need, place)
        for name, size in items.items():
            table.add_row(place, name, size_text(size), f"{size / need.parameters:.2f}")
        total = sum(items.values())
        table.add_row(place, Text("together", style="bold"), size_text(total), f"{total / need.parameters:.2f}")
    if plan.device == "cpu":
        total = need.host_bytes
        table.add_row(
            "memory", Text("device and host", style="bold"), size_text(total), f"{total / need.parameters:.2f}"
        )
    return table


def _pace(plan: MachinePlan) -> Table:
    table = _table("pace", "")
    of_each = "" if len(plan.stages) == 1 else " a stage"
    rows: tuple[tuple[str, str], ...] = (
        ("sequences on a device at a time", str(plan.micro_batch)),
        ("computed twice of each block", _TWICE[plan.recompute]),
        ("a step, at " + f"{plan.flops / 1e12:.3g} TFLOP/s", f"{plan.step_s:.3g} s"),
        ("an exchange, one way", f"{size_text(plan.exchange_bytes)}, {plan.exchange_s:.3g} s"),
        ("steps of a round (H)", str(plan.steps)),
        ("H for 10 % of waiting", str(plan.steps_wanted)),
        ("waiting, of computing", f"{plan.waiting_share:.1%}"),
        ("a round", f"{plan.round_s:.0f} s, {plan.rounds_a_day:.1f} a day"),
        (f"days to {plan.tokens:.3g} tokens, {several(plan.peers, 'peer')}", f"{plan.days:.3g}"),
        ("traffic a day, each way", size_text(plan.traffic_a_day)),
        ("written to disk a day", size_text(plan.written_a_day)),
        (
            "the run's states lie",
            "in files (--state disk)" if any(s.state == "disk" for s in plan.stages) else "in memory",
        ),
    )
    if plan.group_most:
        rows += (("peers that a round merges at most, about", f"{plan.group_most}" + of_each),)
        sent = f"{size_text(plan.leader_bytes)}, {plan.leader_bits_s / 1e6:.2g} Mbit/s"
        rows += ((f"a leader of {plan.leader_peers} sends besides, a round", sent),)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _data_set(plan: DataSetPlan) -> Table:
    sizes = plan.sizes
    table = _table("data set", sizes.root[:16])
    rows = [
        ("tokens to train on", f"{sizes.tokens:,}"),
        ("tokens held out", f"{sizes.held_out_tokens:,}"),
        ("all pages", f"{size_text(sizes.size_bytes)}, {several(sizes.pages, 'page')}"),
        ("rounds of an epoch", f"{plan.rounds_an_epoch:.3g}"),
        ("epochs of the run", "no end" if plan.epochs is None else f"{plan.epochs:.3g}"),
    ]
    if plan.tokens_left is not None:
        rows.append(("tokens left of this epoch", f"{plan.tokens_left:,}"))
    rows += [
        ("a peer downloads a round, about", size_text(plan.round_bytes)),
        ("its cache here, by default at most", size_text(plan.cache_bytes)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left", no_wrap=column != "what")
    return table
