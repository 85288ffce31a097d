"""Write RESULTS.md from the figures in benchmarks/results, one section a file, and what other pages say of them.

    python benchmarks/report.py

A benchmark writes its file with `--json`. Runs of `peer quickstart` and of soak tests have files with a plain table,
{"columns": [...], "rows": [[...], ...]}, written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.agreement import availability_cells, large_model_rows, traffic_rows
from benchmarks.common import scenario_rows
from benchmarks.common.markdown import number, percent, scaled, significant, span, table, yes
from benchmarks.common.options import RESULTS, ROOT
from benchmarks.network import flow_rows
from benchmarks.rounds import size_rows, thin_link_rows, topology_rows
from benchmarks.training import convergence_report

FILE = RESULTS.parent / "RESULTS.md"
GUIDE, README = ROOT / "docs" / "run" / "methods.md", ROOT / "README.md"
BEGIN, END = "<!-- benchmarks/report.py writes this table -->", "<!-- end of the table -->"
INTRODUCTION = """# Results

`python benchmarks/report.py` writes this page from `benchmarks/results`; a benchmark's `--json` writes its file there.
On a loaded machine compare CPU seconds and ratios within a run, not seconds across runs. **Bold** figures miss their
bar.
"""
Figures = dict[str, Any]


def averaging(figures: Figures) -> str:
    """Whole rounds: plan, encode, exchange, merge, outer step, hash, vote and commit; hivemind's step() alone."""
    lines = [
        ("seconds a round, median", lambda f: number(f["median_s"], 3)),
        ("fastest", lambda f: number(f["fastest_s"], 3)),
        ("CPU seconds a peer and round", lambda f: number(f["cpu_s"], 3)),
        ("wire MB, all peers", lambda f: number(f["wire_bytes"] / 1e6, 1)),
        ("of the ideal 2(N-1)/N", lambda f: number(f["of_ideal_wire"], 3)),
        ("maximum error", lambda f: significant(f["error_all"])),
        ("all peers bit-identical", lambda f: yes(f["identical"])),
    ]
    by_width = figures["bits"].items()
    ratios = [f"{x['hivemind']['median_s'] / x['ours']['median_s']:.2f} at {bits} bits" for bits, x in by_width]
    limits = [f"{x['limits']['tcp_s']:.3f} / {x['limits']['memory_s']:.3f} at {bits} bits" for bits, x in by_width]
    return (
        sides(figures, lines)
        + f"\n\nTimes as fast as hivemind (goal: 3): {', '.join(ratios)}. Seconds of ours count plan, encode, exchange,"
        " merge, outer step, state hash, vote and commit; hivemind's count `averager.step()`. The machine's limits for"
        f" the same bytes, TCP / memory, s: {', '.join(limits)}."
    )


def averaging_fault(figures: Figures) -> str:
    """The round in which one peer is struck."""
    return sides(
        figures,
        [
            ("seconds of that round", lambda f: number(f["fault_seconds"], 1)),
            ("outcome", lambda f: str(f["agreed"])),
            ("survivors bit-identical", lambda f: yes(f["identical"])),
            ("maximum error, mean of the survivors", lambda f: significant(f["error_survivors"])),
        ],
    )


def sides(figures: Figures, lines: Sequence[tuple[str, Callable[[Figures], str]]]) -> str:
    """Return ours and hivemind's, at each width, as columns."""
    found = [(who, x[who]) for x in figures["bits"].values() for who in ("ours", "hivemind") if who in x]
    head = ["", *(f"{who} {side['codec']}" for who, side in found)]
    return table(head, [[label, *(show(side) for _, side in found)] for label, show in lines])


def codecs(figures: Figures) -> str:
    """GB/s of fp32, one thread."""
    rows = []
    for source in ("barnraise", "bitsandbytes", "hivemind"):
        group = figures[source]
        for name, row in group.items() if isinstance(group, dict) else ():
            rates = [number(row[f"{way}_gb_s"], 2) for way in ("encode", "decode")]
            if not row.get("meets_bar", True):
                rates = [f"**{rate}**" for rate in rates]
            title = name if source == "barnraise" else f"{source} {name}"
            rows.append([title, *rates, significant(row["bits_per_value"], 4), significant(row["relative_error"])])
    copy = figures["memcpy"]["fp32"]["encode_gb_s"]
    return (
        table(["codec", "encode", "decode", "bits/value", "relative error"], rows)
        + f"\n\nGB/s of fp32 on one thread, by CPU time; a plain copy makes {copy:.2f}. Bars: int8 and two_bit 3 and 2,"
        " int4 1.5 and 1, others 0.4."
    )


def dht(figures: Figures) -> str:
    """Finding and storing records."""
    lines = [
        ("join, p50, ms", "join_ms", 1.0),
        ("put, key new to the node, p50, ms", "put_p50_ms", 1.0),
        ("put again, p50, ms", "put_again_p50_ms", 1.0),
        ("get, key new to the node, p50, ms", "get_p50_ms", 1.0),
        ("get again, p50, ms", "get_again_p50_ms", 1.0),
        ("reads found after 30 % were killed, %", "get_killed_ok", 100.0),
        ("reads found after 30 % froze, %", "get_frozen_ok", 100.0),
        ("read right after 30 % froze, p99, ms", "get_frozen_p99_ms", 1.0),
        ("idle CPU a node, %", "idle_cpu_percent_a_node", 1.0),
        ("memory a node, MB", "rss_mb_a_node", 1.0),
    ]
    who = [side for side in ("barnraise", "hivemind") if side in figures]
    return table(["", *who], [[label, *(scaled(figures[w][key], by) for w in who)] for label, key, by in lines])


def flow(figures: Figures) -> str:
    """What a small message costs. Bars: 0.25 ms CPU for 1 KB by flow when cold, 0.06 by the ring."""
    return table(flow_rows.columns(), flow_rows.rows(figures["ways"])) + (
        f"\n\nCPU of both processes. Cold: one every 4 ms. Beside: cold, on a link of {figures['mbit']:g} Mbit/s that a"
        " transfer fills; its shaper lets 64 KiB through at a time, which take 5 ms."
    )


def state_transfer(figures: Figures) -> str:
    """A joiner's fetch by the number of donors."""
    limits = ", ".join(
        f"{name.removesuffix('_mb_per_s').replace('_', ' ')} {value:.0f}" for name, value in figures["limits"].items()
    )
    return (
        table(["donors", "MB/s"], [[f"{row['donors']}", number(row["mb_per_s"], 0)] for row in figures["fetch"]])
        + f"\n\n{figures['size_mb']:.0f} MB of state. Limits, MB/s: {limits}."
    )


def late_join(figures: Sequence[Figures]) -> str:
    """The others' rounds beside a fetch."""
    rows = [
        [
            f"{run['joiner_nice']}",
            f"{run['round_s_alone']:.3f} ({run['rounds_alone']} rounds)",
            f"{run['round_s_beside_a_fetch']:.3f} ({run['rounds_beside']} rounds)",
            f"{run['slowdown']:+.1%}",
            f"{run['member_cpu_s_alone']:.3f} / {run['member_cpu_s_beside']:.3f}",
            number(run["fetch_mb_s"], 0),
        ]
        for run in figures
    ]
    head = ["nice of the joiner", "s a round alone", "beside a fetch", "slower", "CPU s a round", "fetch, MB/s"]
    peers, params = figures[0]["peers"], figures[0]["params"]
    return f"{peers} peers, {params:,} parameters; the joiner shares their cores.\n\n{table(head, rows)}"


def overlap(figures: Figures) -> str:
    """Streaming DiLoCo beside DiLoCo on slow links."""
    found = [(name, figures[name]) for name in ("diloco", "streaming") if name in figures]
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("worker idle (bar 3 %)", lambda f: percent(f["idle"], 2)),
        ("of the worst peer", lambda f: percent(f["idle_worst_peer"], 2)),
        ("largest exchange, MB sent a peer", lambda f: number(f["exchange_bytes"] / 1e6, 2)),
        ("limit: as coded", lambda f: number(f["least_bytes"] / 1e6, 2)),
        ("peak bandwidth, Mbit/s", lambda f: number(f["peak_mbit"], 1)),
        ("tokens/s", lambda f: number(f["tokens_per_s"], 0)),
    ]
    return (
        f"{figures['peers']} peers at {figures['mbit']:g} Mbit/s both ways; H {figures['steps']} in"
        f" {figures['fragments']} fragments, tau {figures['tau']}, int8.\n\n"
        + table(["", *(name for name, _ in found)], [[label, *(show(f) for _, f in found)] for label, show in lines])
    )


def rebalance(figures: Figures) -> str:
    """Policies on preemption traces, and ours at each size."""
    policies = [
        [name, span(row["overall"], "{:.1f}"), span(row["moves"], "{:,.0f}") if row["moves"] else "-"]
        for name, row in figures["summary"].items()
    ]
    sizes = [
        [
            f"{row['peers']:,}",
            number(row["percent_of_optimal"], 1),
            significant(row["read_bytes_a_peer_minute"] / 1e3),
            significant(row["decision_cpu_ms"]),
        ]
        for row in figures["growth"]
    ]
    return (
        "Virtual time; generated preemption traces of 400 peers and 32 h.\n\n"
        + table(["rebalancing", f"% of optimal (bar {figures['bar']:.0f})", "moves"], policies)
        + "\n\nAn hour in which half of the peers fail:\n\n"
        + table(["peers", "% of optimal", "kB read a peer and minute", "CPU ms a decision"], sizes)
    )


def swarm(figures: Figures) -> str:
    """Overhead and reached rate of pipelines."""
    parts = []
    for name, words in (
        ("dense", "`dense`: hidden size 1024, int8 between stages"),
        ("thin", "`thin`: fp32 between stages, limited by the link"),
    ):
        rows = figures.get(name, {}).get("rows", [])
        cells = [
            [
                "loopback" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s",
                f"{row['stages']}",
                "-" if row["overhead"] is None else barred(f"{row['overhead']:+.1%}", row["overhead"] < 0.10, row),
                barred(percent(row["reached"], 1), row["reached"] >= 0.85, row),
            ]
            for row in rows
        ]
        parts.append(f"{words}.\n\n" + table(["links", "stages", "overhead", "reached"], cells))
    return (
        "Every stage is a process. Overhead is CPU a token against plain torch (bar 10 % on loopback); reached is the"
        f" share of what cores or links allow (bar 85 %). Packets are {figures['delay_ms']:g} ms late on links.\n\n"
        + "\n\n".join(parts)
    )


def barred(text: str, met: bool, row: Figures) -> str:
    """Mark a figure that misses its bar, where it has one."""
    judged = (row["setting"] == "thin" and row["limit"] == "link") or row["setting"] == "dense"
    if "+" in text or text.startswith("-"):
        judged = row["mbit"] is None
    return text if met or not judged else f"**{text}**"


def activations(figures: Figures) -> str:
    """Loss by the codec between stages."""
    rows = [
        [
            "fp32" if row["codec"] == "none" else row["codec"],
            number(row["loss"], 4),
            f"{row['gap']:+.4f}",
            f"{significant(row['forward_error'])} / {significant(row['backward_error'])}",
            number(row["bytes_a_token"], 0),
        ]
        for row in figures["rows"]
    ]
    head = [
        "between 4 stages",
        "loss",
        "against fp32 (bar .02 for int8)",
        "relative error forward / backward",
        "bytes a token, hop and way",
    ]
    return table(head, rows)


def availability(figures: Figures) -> str:
    """The share of the time that makes progress while machines fail, beside the model's."""
    cells = figures["cells"]
    hours = sum(cell["seconds"] for cell in cells) / 3600
    untold = sum(cell["untold"] for cell in cells)
    return (
        f"The real core in virtual time: in {hours:,.0f} h of groups no safety invariant broke, and {untold}"
        " standstills were not reported to the operator. Members fail after 600 s, are repaired after 120 s, and so"
        f" is W (the coordinator), all exponential. Percent of the time: committed rounds x {figures['round_s']:g} s, ±"
        f" the standard error over windows of {figures['window_s']:,.0f} s. Those that stay were not taken back, nor"
        " lost with a run, by the end. In `witness` mode the operator acts 2 h or 10 min after being told, with"
        " `--undo` where asked for, and begins another run after ten vain minutes; in `required` mode `undo_s` is"
        " 100 s, and a quorum is lost after three rounds. The model is the design's, in whole rounds without"
        " messages: `required` starts a term 10 or 30 s after a lost quorum. Runs lost: `witness` (2 h / 10 min) /"
        " `required`.\n\n" + table(availability_cells.HEAD, availability_cells.rows(cells))
    )


def partitions(figures: Figures) -> str:
    """What real processes lose when links are cut, with the bound of each figure."""
    return (
        "Eight `peer join` and a coordinator, each in a network namespace of its own. A cut swallows packets where they"
        " arrive (iptables), so that no peer is told. Hidden size 64, 20 steps a round, one thread a peer; all share"
        " this machine's cores. The histories of all peers are checked after each scenario.\n\n"
        + table(scenario_rows.HEAD, scenario_rows.rows(figures))
    )


RULES = ("mean", "trimmed_mean", "median", "flag")


def merging(figures: Figures) -> str:
    """CPU seconds of a merge."""
    seconds = [
        [str(row["contributors"]), *(f"{row[r]:.2f} ({row[r] / row['mean']:.1f})" for r in RULES)]
        for row in figures["seconds"]
    ]
    return f"CPU seconds for {figures['values']:,} values in int8, in brackets: times the mean's.\n\n" + table(
        ["contributors", *RULES], seconds
    )


def plain(figures: Figures) -> str:
    """Return a table that is written out in the file."""
    return table(figures["columns"], [[str(cell) for cell in row] for row in figures["rows"]])


SECTIONS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "averaging": ("Averaging: whole rounds beside hivemind", averaging),
    "rounds/sizes": ("Averaging: other sizes beside hivemind", size_rows.section),
    "rounds/shares": ("Averaging: links of unequal speed", size_rows.by_link),
    "rounds/thin_links": ("Thin links: the share of the time computing", thin_link_rows.section),
    "rounds/outer_step": ("A whole outer step of a large model", size_rows.outer_step),
    "rounds/topologies": ("Averaging: ways of the updates", topology_rows.section),
    "averaging_kill": ("Averaging: one of four peers is killed in the exchange", averaging_fault),
    "averaging_freeze": ("Averaging: one of four peers freezes in the exchange", averaging_fault),
    "codecs": ("Codecs", codecs),
    "merging": ("Merge rules", merging),
    "training/loss_checks": ("Check by loss", plain),
    "training/fp16": ("Peers that compute in fp16", plain),
    "training/tuning": ("An adapter tuned by three peers", plain),
    "training/split_weights": ("Peers that hold split weights", plain),
    "convergence": ("Convergence: loss against bytes", convergence_report.section),
    "serving/quantized": ("Served models in 8 and 4 bits", plain),
    "dht": ("DHT", dht),
    "flow": ("Messages: calls, flows, the ring to the worker", flow),
    "state_transfer": ("State transfer", state_transfer),
    "late_join": ("Late join", late_join),
    "overlap": ("Overlap: Streaming DiLoCo on slow links", overlap),
    "rebalance": ("Rebalancing", rebalance),
    "availability": ("Availability under churn", availability),
    "agreement/traffic": ("Messages of the agreement", traffic_rows.section),
    "agreement/large_models": ("Hashes of large models", large_model_rows.section),
    "partitions": ("Partitions, lost packets, free-riders: real processes", partitions),
    "swarm": ("Pipelines", swarm),
    "activations": ("Activations between stages", activations),
    "training/data_build": ("Data sets: building one", plain),
    "training/pages": ("Data sets: peers that fetch pages", plain),
    "machine/steps": ("Training steps on one GPU", plain),
    "quickstart_pipeline": ("Pipeline quickstart: a kill and a join", plain),
    "pipeline_faults": ("Pipeline: scripted faults", plain),
    "pipeline_churn": ("Pipeline: random churn", plain),
    "stage_rebalancing": ("Pipeline: a stage loses two replicas", plain),
}


def report(folder: Path = RESULTS) -> str:
    """Return RESULTS.md made from the files of `folder`."""
    parts = [INTRODUCTION]
    for name, (title, render) in SECTIONS.items():
        file = folder / f"{name}.json"
        if file.exists():
            found = json.loads(file.read_text())
            head = f"`{found['command']}`: {found['machine']}; commit {found['commit']}, {found['date']}."
            note = f" {found['note']}" if "note" in found else ""
            parts.append(f"## {title}\n\n{head}{note}\n\n{render(found['figures'])}\n")
    return "\n".join(parts)


def guide(page: str, figures: Figures) -> str:
    """Return docs/run/methods.md with the losses and bytes of the methods between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{GUIDE} has no {BEGIN} and {END}: put them back, the table of methods goes between")
    return f"{before}{BEGIN}\n\n{convergence_report.guide(figures)}\n\n{END}{after}"


def readme(page: str, figures: Figures) -> str:
    """Return README with its line about the bytes of a worker."""
    line = convergence_report.sentence(figures)
    lines = page.split("\n")
    places = [at for at, old in enumerate(lines) if old.startswith(line[: line.index(",")])]
    if len(places) != 1:
        raise SystemExit(f"{README} has {len(places)} lines about the bytes of a worker: keep one in its table")
    lines[places[0]] = line
    return "\n".join(lines)


def main() -> None:
    """Write the pages and the picture."""
    FILE.write_text(report())
    figures = json.loads((RESULTS / "convergence.json").read_text())["figures"]
    GUIDE.write_text(guide(GUIDE.read_text(), figures))
    README.write_text(readme(README.read_text(), figures))
    convergence_report.draw(figures)


if __name__ == "__main__":
    main()
