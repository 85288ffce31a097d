"""`peer quickstart`: a coordinator and several peers on this machine, one killed and one added half-way.

The children are real processes that run `peer coordinate` and `peer join` as a user would; this process only starts
them, reads their event streams, kills one, adds one, and at the end checks that every invariant held.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from cli.children import ChildPeer, Children, children
from cli.coordinate import template
from cli.live import POLL_S, read_tails, shown
from cli.progress import Progress, size_text
from cli.report import Report, draw_losses, write_report
from cli.verdict import Story, judge, train_losses
from peer.errors import ConfigError, NetworkError, ResourceError, RoundError
from swarm.home import Home

LOOPBACK: Final = ("--listen", "/ip4/127.0.0.1/tcp/0")
START_S: Final = 90.0  # importing torch on a cold disk
SILENCE_S: Final = 180.0  # without a commit: something is wrong that waiting does not mend
COORDINATOR: Final = "coordinator"
MARK: Final = ".barnraise-quickstart"
LEFTOVERS: Final = ("run.toml", "report.json", "loss.png", "coordinator*", "peer-*")


@click.command()
@click.option("--peers", type=click.IntRange(3, 16), default=4, show_default=True, help="How many peers train.")
@click.option("--rounds", type=click.IntRange(4, 10_000), default=12, show_default=True, help="Rounds to commit.")
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("quickstart"),
    show_default=True,
    help="Folder for the peers' homes, logs, report.json and loss.png.",
)
def quickstart(peers: int, rounds: int, home: Path) -> None:
    """Train a small language model on the text of Python's standard library with several peers on this machine.

    Half-way one peer is killed (SIGKILL) and another one joins. Exit code 0 means that every invariant held: all peers
    ended every round with bit-identical weights, no round was lost for good, the held-out loss fell.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with Ctrl-C ignored
    began = time.time()
    _prepare(home, rounds)
    progress = Progress(f"quickstart: {peers} peers, {rounds} rounds, in {home}", keeps_all=True)
    with children() as group, shown(progress) as redraw:
        story = _Run(home, rounds, group, progress, redraw).play(peers)
    report = judge(story, progress, rounds, began)
    write_report(home / "report.json", report)
    _draw(home, progress, story)
    _summarize(report, home)
    if report.broken_invariants:
        raise RoundError(f"an invariant did not hold: {'; '.join(report.broken_invariants)}. Read the logs in {home}.")


class _Run:
    """The run's course. Every wait ends by itself: with what it waited for or with an error that says what happened."""

    def __init__(
        self, home: Path, rounds: int, group: Children, progress: Progress, redraw: Callable[[], None]
    ) -> None:
        self._home = home
        self._invite = Home(home / COORDINATOR).invite
        self._rounds = rounds
        self._group = group
        self._progress = progress
        self._redraw = redraw
        self._heard = time.monotonic()
        self._round = 0

    def play(self, peers: int) -> Story:
        self._group.start(COORDINATOR, self._home / COORDINATOR, self._coordinate(), threads=1)
        self._wait(START_S, "the coordinator prints its invite", self._invite.exists)
        started = [self._join(number) for number in range(1, peers + 1)]
        turn = max(1, self._rounds // 3)
        self._wait(None, f"round {turn} is committed", lambda: self._progress.round >= turn)
        victim = started[1]
        victim.kill()
        self._progress.row(victim.name).gone = "killed"
        self._progress.note(f"killed {victim.name} (SIGKILL)")
        added = self._join(peers + 1)
        self._progress.note(f"added {added.name}")
        survivors = [child for child in (*started, added) if child is not victim]
        self._wait(None, "all peers finish", lambda: not any(child.alive for child in survivors))
        return Story(self._group.peers, [victim.name], [added.name], [child.name for child in survivors])

    def _coordinate(self) -> list[str]:
        return ["coordinate", str(self._home / "run.toml"), *LOOPBACK]

    def _join(self, number: int) -> ChildPeer:
        name = f"peer-{number}"
        arguments = ["join", str(self._invite), "--name", name, "--device", "cpu", "--threads", "1", *LOOPBACK]
        self._progress.row(name)
        return self._group.start(name, self._home / name, arguments, threads=1)

    def _wait(self, limit_s: float | None, what: str, done: Callable[[], bool]) -> None:
        """Until `done()`; without a limit, as long as rounds go on."""
        began = time.monotonic()
        while not done():
            self._look()
            now = time.monotonic()
            if limit_s is not None and now - began > limit_s:
                raise RoundError(f"waited {limit_s:.0f} s until {what}, in vain: read the logs in {self._home}.")
            if limit_s is None and now - max(self._heard, began) > SILENCE_S:
                raise RoundError(f"no round was committed for {SILENCE_S:.0f} s: read the logs in {self._home}.")
            time.sleep(POLL_S)
        self._look()

    def _look(self) -> None:
        """Read what the children say and notice those that died."""
        tails = {child.name: child.events for child in self._group.peers.values()}
        read_tails(self._progress, tails)
        if self._progress.round > self._round:
            self._round, self._heard = self._progress.round, time.monotonic()
        for child in self._group.peers.values():
            if child.alive or child.until is not None:
                continue
            child.until = time.time()
            if child.process.returncode != 0:
                raise NetworkError(
                    f"{child.name} ended with exit code {child.process.returncode}: {child.last_words()}"
                )
        self._redraw()


def _prepare(home: Path, rounds: int) -> None:
    """A folder with the run's RUN.toml and our mark; what an earlier quickstart left there is removed, nothing else."""
    mark = home / MARK
    try:
        if home.exists() and any(home.iterdir()) and not mark.exists():
            raise ConfigError(f"{home} is not empty and no quickstart's: choose another folder with --home.")
        home.mkdir(parents=True, exist_ok=True)
        mark.touch()
        for pattern in LEFTOVERS:
            for path in home.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (home / "run.toml").write_text(run_toml(rounds))
    except OSError as error:
        raise ResourceError(f"cannot write to {home} ({error.strerror}): choose another folder with --home.") from error


def run_toml(rounds: int) -> str:
    """The embedded example for that many rounds: the learning rate's schedule ends with them."""
    text = template()
    steps_found = re.search(r"^steps = (\d+)", text, re.MULTILINE)
    assert steps_found is not None
    text = re.sub(r"^rounds = \d+", f"rounds = {rounds}", text, count=1, flags=re.MULTILINE)
    total = rounds * int(steps_found[1])
    return re.sub(r"^total_steps = \d+", f"total_steps = {total}", text, count=1, flags=re.MULTILINE)


def _draw(home: Path, progress: Progress, story: Story) -> None:
    marks = {}
    for name in (*story.killed, *story.added):
        rounds = progress.commits.get(name)
        if rounds:
            marks.update({max(rounds): f"{name} killed"} if name in story.killed else {min(rounds): f"{name} joined"})
    draw_losses(home / "loss.png", dict(sorted(progress.val_losses.items())), train_losses(progress), marks)


def _summarize(report: Report, home: Path) -> None:
    up = max(peer.bytes_up for peer in report.peers.values())
    click.echo(
        f"\n{report.rounds_committed} rounds committed, {report.rounds_discarded} discarded,"
        f" {report.tokens / 1e6:.1f} million tokens in {report.wall_s:.0f} s.\n"
        f"Held-out loss {report.val_loss_first:.3f} -> {report.val_loss_last:.3f} nats per byte.\n"
        f"Every survivor holds state {report.state_hash[:16]}.\n"
        f"At most {size_text(up)} sent per peer, {report.traffic_factor:.0f} times less than an fp32 all-reduce every"
        f" step would take ({size_text(report.ddp_bytes_equivalent)}).\n\n"
        f"What it writes now:\n{report.sample}\n\n"
        f"{home / 'report.json'} has the numbers, {home / 'loss.png'} the curve; a model for other software:\n"
        f"  peer export --home {home / 'peer-1'} --out model"
    )
