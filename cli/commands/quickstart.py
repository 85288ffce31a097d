"""`peer quickstart`: train a small model with several peers on this machine.

During the run one peer is added and one is killed; with --stages another one is frozen for a while.
The children are real processes that run `peer coordinate` and `peer join` as a user would. This process starts them,
reads their event streams, causes the faults, and checks at the end that every invariant held.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import click
import msgspec

from cli.demo.child_processes import children
from cli.demo.cluster import LocalCluster
from cli.demo.monitoring import Monitor
from cli.demo.report import Report, write_report
from cli.demo.scenario import play_pipeline, play_whole
from cli.demo.served_sample import ServedSample, serve_sample
from cli.demo.tuning import announce, tune
from cli.demo.verdict import judge, train_losses
from cli.options import count_option
from cli.packages import check_web_packages
from cli.progress.progress import Progress
from cli.run import stopping_by_signal
from cli.templates import template, with_settings
from cli.terminal.lines import say
from cli.views.live import shown
from cli.views.loss_picture import PICTURE, draw_losses
from peer.errors import ConfigError, ResourceError, RoundError
from peer.figures import number_text, quoted, several, size_text
from swarm.run.config import parse_run_config
from swarm.run.home import Home

PEERS_MAX: Final = 16
SPARE: Final = 2  # one is killed and one is frozen; every stage keeps a replica
PIPELINE_STEPS: Final = 30
ROUNDS_MIN: Final = 6  # the added peer must have rounds left to take part in
PIPELINE_ROUNDS_MIN: Final = 8
MARK: Final = ".barnraise-quickstart"
LEFTOVERS: Final = (
    "run.toml",
    "report.json",
    "loss.png",
    "coordinator*",
    "peer-*",
    "server-*",
    "model",
    "monitor*",
    "tuned*",
)


@click.command()
@count_option("--peers", 3, PEERS_MAX, 4, "Number of peers that train.")
@count_option("--stages", 1, 8, 1, "Number of stages of the model.")
@count_option("--rounds", 1, 10_000, 12, "At least 6; with --stages 8.")
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("quickstart"),
    show_default=True,
    help="Folder for the peers' homes, their logs, report.json and loss.png.",
)
@click.option(
    "--serve", "serves", is_flag=True, help="At the end, kill one of three block servers in the middle of an answer."
)
@click.option(
    "--monitor", "watches", is_flag=True, help="Show the run on a web page, which stays in --home when it is over."
)
@click.option("--tune", "tunes", is_flag=True, help="At the end, tune the model to a style with an adapter.")
def quickstart(peers: int, stages: int, rounds: int, home: Path, serves: bool, watches: bool, tunes: bool) -> None:
    """Train a small language model on the text of Python's standard library with several peers on this machine.

    During the run one peer joins and one is killed (SIGKILL). Exit code 0 means that every invariant held: all peers
    ended every round with bit-identical weights, no round was lost for good, and the held-out loss fell.

    With --stages no peer holds the whole model, and another peer is frozen for a while (SIGSTOP). The invariants are
    then: the replicas of a stage ended every round with the same weights, no stage counted a micro-batch twice or lost
    one, and the training loss fell.

    In the end block servers serve the trained model, and it answers a message through the network. With --tune three
    peers then train an adapter beside it, on a small set of conversations.
    """
    if tunes and stages > 1:
        raise ConfigError("--tune is for a whole model: leave out --stages")
    if stages > 1 and peers < stages + SPARE:
        raise ConfigError(f"{stages} stages need {stages + SPARE} peers here, as some will fail: raise --peers")
    least = ROUNDS_MIN if stages == 1 else PIPELINE_ROUNDS_MIN
    if rounds < least:
        raise ConfigError(f"{rounds} rounds are too few for the peer that is added: give --rounds {least} or more")
    _claim(home)
    if watches:
        check_web_packages("--monitor", metrics=True)
    with stopping_by_signal(), Home(home).locked():
        _prepare(home, rounds, stages)
        _play(peers, stages, rounds, home, serves, Monitor(home) if watches else None)
        if tunes:
            _tune(home)


def _play(peers: int, stages: int, rounds: int, home: Path, serves: bool, monitor: Monitor | None) -> None:
    """Run the cluster and judge it. Raises RoundError if an invariant did not hold."""
    began = time.time()
    title = f"quickstart: {peers} peers, {rounds} rounds, in {home}"
    progress = Progress(title if stages == 1 else f"{title}, {stages} stages", keeps_all=True, stages=stages)
    progress.homes["coordinator"] = home / "coordinator"
    with children() as group, shown(progress) as redraw, monitor or nullcontext():
        play = play_whole if stages == 1 else play_pipeline
        scenario = play(LocalCluster(home, rounds, group, progress, redraw, monitor), peers)
        if monitor is not None:
            monitor.see_the_end()  # of the coordinator, which stays until here
    report = judge(scenario, progress, rounds, began)
    served = None
    if not report.broken_invariants:
        say("The model is trained. Block servers start, to chat with it through the network.", err=True)
        served = serve_sample(home, _homes(report, home), kills=serves)
        report = msgspec.structs.replace(report, sample=served.text)
    write_report(home / "report.json", report)
    draw_losses(home / PICTURE, dict(sorted(progress.val_losses.items())), train_losses(progress), scenario.marks)
    _summarize(report, home, served)
    if monitor is not None:
        say("", monitor.last_words, uncut=True)
    if report.broken_invariants:
        raise RoundError(f"an invariant did not hold ({'; '.join(report.broken_invariants)}): read the logs in {home}")


def _tune(home: Path) -> None:
    """Tune the run's model and print the result. Raises RoundError if it is no better."""
    announce()
    tuned = tune(home)
    (home / "tuned.json").write_bytes(msgspec.json.format(msgspec.json.encode(tuned), indent=2))
    say("", *tuned.text.split("\n"), "", uncut=True)
    say(f"The adapter: {_this_command()} export {Home(home / 'tuned' / 'peer-1').option} --out adapter", uncut=True)
    if not tuned.is_better:
        raise RoundError(f"the tuned model has not learned the style: read the logs in {home / 'tuned'}")


def _claim(home: Path) -> None:
    """Mark a folder as a quickstart's. Raises ConfigError if it holds files that no quickstart has put there."""
    mark = home / MARK
    try:
        if home.exists() and any(home.iterdir()) and not mark.exists():
            raise ConfigError(f"{home} is not empty and not a quickstart's: choose another folder with --home")
        home.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise ResourceError(f"cannot write to {home} ({error.strerror}): choose another folder with --home") from error


def _prepare(home: Path, rounds: int, stages: int = 1) -> None:
    """Remove what an earlier quickstart left in the folder, nothing else, and write RUN.toml."""
    try:
        for pattern in LEFTOVERS:
            for path in home.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (home / "run.toml").write_text(run_toml(rounds, stages))
    except OSError as error:
        raise ResourceError(f"cannot write to {home} ({error.strerror}): choose another folder with --home") from error


def run_toml(rounds: int, stages: int = 1) -> str:
    """Return the embedded example for that many rounds, with which the learning rate's schedule ends.

    In a pipeline every stage has two blocks, and rounds are shorter.
    """
    text = template()
    steps = parse_run_config(text).outer.steps if stages == 1 else PIPELINE_STEPS
    on_one_machine = {
        "rounds": rounds,
        "open": True,
        "members_per_prefix": PEERS_MAX + 1,
        "lone_survivor": True,  # it is ours, so it does not lie
    }
    text = with_settings(text, "run", on_one_machine)
    text = with_settings(text, "inner", {"total_steps": rounds * steps})
    text = with_settings(text, "outer", {"steps": steps})
    if stages == 1:
        return text
    text = with_settings(text, "model", {"layers": 2 * stages, "tie_embeddings": False})
    return with_settings(text, "pipeline", {"stages": stages})


def _homes(report: Report, home: Path) -> list[Path]:
    """Return the homes from which the model can be exported: one of each stage."""
    if not report.stages:
        return [home / "peer-1"]
    names = {peer: seen["name"] for peer, seen in report.peers.items()}
    return [home / names[stage.replicas[0]] for stage in report.stages if stage.replicas]


def _summarize(report: Report, home: Path, served: ServedSample | None = None) -> None:
    held = f"All surviving peers hold the same weights, state {report.state_hash[:16]}."
    if report.stages:
        states = ", ".join(
            f"stage {stage.stage} at {stage.state_hash[:8]} ({several(len(stage.replicas), 'peer')})"
            for stage in report.stages
        )
        held = f"Weights: {states}.\n{_micro_batch_text(report)}"
    options = " ".join(Home(path).option for path in _homes(report, home))
    text = (
        f"\n{report.rounds_committed} rounds committed, {report.rounds_discarded} discarded:"
        f" {report.tokens / 1e6:.1f} million tokens in {report.wall_s:.0f} s.\n"
        f"Held-out loss {number_text(report.val_loss_first)} -> {number_text(report.val_loss_last)} nats per byte.\n"
        f"{held}\n"
        f"{_traffic_text(report)}\n\n"
        f"{_served_text(report, served)}"
        f"The numbers are in {home / 'report.json'}, the loss curve in {home / 'loss.png'}. To export the model,"
        " and to talk with it on this machine:\n"
        f"  {_this_command()} export {options} --out model\n"
        f"  {_this_command()} chat --model model"
    )
    say(*text.split("\n"), uncut=True)


def _served_text(report: Report, served: ServedSample | None) -> str:
    """Return what the model said, and who computed it."""
    if served is None:
        return ""
    answer = served.answer
    names = " and ".join(str(hop["name"]) for hop in answer["route"])
    killed = f" {served.killed} was killed in the middle of it." if served.killed else ""
    rate = len(answer["tokens"]) / max(answer["seconds"], 1e-3)
    return (
        f"What the model says, {len(answer['tokens'])} tokens at {rate:.0f} a second, by {names}:{killed}\n"
        f"{report.sample}\n\n"
    )


def _this_command() -> str:
    """Return what to type for the running `peer`: its name where the shell finds it, else its path."""
    own = Path(sys.executable).with_name("peer")
    found = shutil.which("peer")
    if not own.exists() or (found is not None and os.path.samefile(found, own)):
        return "peer"
    return quoted(own)


def _traffic_text(report: Report) -> str:
    """Return the bytes sent: against an all-reduce; in a pipeline, a token."""
    sent = [peer["bytes_up"] for peer in report.peers.values()]
    if report.stages:
        return (
            f"All peers together sent {size_text(sum(sent))}, {sum(sent) / max(1, report.tokens):.0f} bytes a token"
            f" (hidden states, gradients, updates, weights for joiners). The busiest peer sent {size_text(max(sent))}."
        )
    return (
        f"No peer sent more than {size_text(max(sent))}, {report.traffic_factor:.0f} times less than with an fp32"
        f" all-reduce after every step ({size_text(report.ddp_bytes_equivalent)})."
    )


def _micro_batch_text(report: Report) -> str:
    """Return how often micro-batches counted."""
    counts = report.micro_batches
    assert counts is not None
    merged = ", ".join(str(stage.merged) for stage in report.stages)
    lost = ", ".join(f"{stage.lost} at stage {stage.stage}" for stage in report.stages[1:])
    missed = ", ".join(f"{stage.uncounted} at stage {stage.stage}" for stage in report.stages[1:])
    undone = f" Merged by later stages only: {counts.undone}." if counts.undone else ""
    return (
        f"{counts.dispatched} micro-batches dispatched, {counts.completed} completed, {counts.retried} retried;"
        f" {counts.double_counted} counted twice, {counts.lost} lost.\n"
        f"Merged by the stages: {merged}. Declared lost: {lost}. Uncounted: {missed}.{undone}\n"
        f"Moves between stages: {len(report.moves)}."
    )
