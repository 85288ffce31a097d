"""The loss of a run as a picture: of the rounds that the event log of a home tells of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from cli.progress.losses import Losses, losses_in
from peer.errors import BarnraiseError, ConfigError, ResourceError
from peer.plain_text import plain

PICTURE: Final = "loss.png"
_NAME_CHARS_MAX: Final = 70
_FORMATS: Final = (".png", ".svg", ".pdf")


def leave_picture(home: Path, say: Callable[[str], None]) -> None:
    """Draw the losses into `home` if there are any, and say where, or why that did not work, which ends nothing."""
    try:
        if losses := losses_in(home):
            draw_home(losses, home / PICTURE)
            say(f"The loss curve is in {home / PICTURE}.")
    except (BarnraiseError, ImportError) as error:
        say(f"The loss curve was not drawn: {error}")


def draw_home(losses: Losses, path: Path) -> None:
    """Draw `losses` to a file. Raises ConfigError or ResourceError."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path} is no picture: name a file that ends in {', '.join(_FORMATS)}")
    held_out, training = dict(sorted(losses.held_out.items())), dict(sorted(losses.training.items()))
    unit = "nats per byte" if losses.in_bytes else "nats per byte, training: token"
    draw_losses(path, held_out, training, {}, unit, losses.run)


def draw_losses(
    path: Path,
    val_losses: Mapping[int, float],
    train_losses: Mapping[int, float],
    marks: Mapping[int, str],
    unit: str = "nats per byte",
    run: str = "",
) -> None:
    """Draw held-out and training loss by round, `marks` (texts by round) as vertical lines, and the name of the run.
    Raises ResourceError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    if val_losses:
        axes.plot(list(val_losses), list(val_losses.values()), "o:", label="held-out, where measured")
    if train_losses:
        axes.plot(list(train_losses), list(train_losses.values()), ".--", alpha=0.6, label="training")
    top = axes.get_ylim()[1]
    for number, text in marks.items():
        axes.axvline(number, color="grey", linewidth=0.8)
        axes.text(number, top, f" {text}", rotation=90, va="top", ha="right", fontsize=7, color="grey")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("committed round")
    axes.set_ylabel(unit)
    axes.legend()
    axes.set_title(plain(run, _NAME_CHARS_MAX), fontsize=10, parse_math=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a name in letters that the font lacks is drawn as boxes
            figure.tight_layout()
            figure.savefig(path)
    except OSError as error:
        raise ResourceError(f"cannot write {path} ({error.strerror}): free some space, or name another file") from error
    finally:
        pyplot.close(figure)
