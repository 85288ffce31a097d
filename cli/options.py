"""Options that several commands share, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from cli.known_homes import invite_called
from peer.config import ComputeType, MasterType
from peer.errors import ConfigError
from peer.footprint.layout import Compute, Layout, parse_devices
from peer.ipc.corpus_messages import OwnText
from peer.net.reach import Reach
from swarm.run.invite import PREFIX, Invite, read_saved_invite

if TYPE_CHECKING:
    from peer.config import ModelConfig, Quantization

Command = TypeVar("Command", bound=Callable[..., Any])
_INVITE_FILE_MAX = 1 << 16
_PATH_CHARS_MAX = 4096
_FIELD_CHARS_MAX = 128
_THREADS_MAX = 4096
_AMOUNT_MAX = 1_000_000  # in GB: a petabyte


def read_invite(text: str) -> Invite:
    """Parse an invite: its text, the path of a file with it, a peer's home, or a name that `peer ls` lists, in this
    order. Raises ConfigError."""
    if _is_invite(text):
        return Invite.parse(text)
    path = Path(text)
    try:
        if len(text) < _PATH_CHARS_MAX and path.is_dir():
            return read_saved_invite(path)
        if len(text) < _PATH_CHARS_MAX and path.is_file() and path.stat().st_size <= _INVITE_FILE_MAX:
            return Invite.parse(path.read_text(errors="replace"))
    except (OSError, ValueError):
        pass  # too long for a file name, or not readable
    if "/" in text:
        raise ConfigError(f"{text!r} names no file that can be read: copy the invite itself, or correct the path")
    return invite_called(text)


def _is_invite(text: str) -> bool:
    return text.lstrip().lower().startswith(PREFIX)


def checkpoint_folder(model: str) -> Path:
    """Return the folder of a checkpoint: a path, or the id of one in the Hugging Face cache. Raises ConfigError."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigError(f"{model} is no folder: name that of a checkpoint, or its id as OWNER/NAME")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"{model} is not in the Hugging Face cache of this machine, and this command downloads nothing: fetch it"
            f" with `hf download {model}`, or name a folder"
        ) from error


def invite_argument(required: bool = True) -> Callable[[Command], Command]:
    """Add the argument INVITE. An invite that a chat program or a terminal has broken into several words is one."""

    def joined(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> str | None:
        return "".join(words) or None

    return click.argument(
        "invite", nargs=-1, required=required, callback=joined, metavar="INVITE" if required else "[INVITE]"
    )


def _handed_as(name: str, build: Callable[..., object], *options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Add options. The command gets, as `name`, what `build` makes of their values."""

    def add(function: Command) -> Command:
        @wraps(function)
        def command(*words: Any, **values: Any) -> Any:
            own = {option: values.pop(option) for option in names}
            return function(*words, **values, **{name: build(**own)})

        params = command.__dict__.setdefault("__click_params__", [])  # where click.option keeps them
        others = len(params)
        for option in reversed(options):
            option(command)
        names = [param.name for param in params[others:]]
        return cast("Command", command)

    return add


_REACH: Final = {
    "relay": click.option(
        "--relay",
        "relays",
        multiple=True,
        metavar="MULTIADDR",
        help="A relay (`peer relay`) that makes this machine reachable. May be given several times.",
    ),
    "map_port": click.option(
        "--map-port/--no-map-port",
        default=False,
        help="Have this network's router forward the port (UPnP) while the command runs.",
    ),
    "lan": click.option(
        "--lan/--no-lan",
        default=False,
        help="Find peers of the run on this local network, and announce this machine as a peer of Barnraise"
        " (multicast DNS).",
    ),
    "bootstrap": click.option(
        "--bootstrap",
        multiple=True,
        metavar="MULTIADDR",
        help="A further bootstrap address to put into the invite. May be given several times.",
    ),
}


def reach_options(listen: str, *others: str) -> Callable[[Command], Command]:
    """Add --listen (with this default), --announce and others: how peers reach this machine. The command gets them as
    `reach`."""
    return _handed_as(
        "reach",
        Reach,
        click.option(
            "--listen",
            multiple=True,
            metavar="MULTIADDR",
            default=(listen,),
            show_default=True,
            help="Address to accept connections on; port 0 picks a free port. May be given several times.",
        ),
        click.option(
            "--announce",
            multiple=True,
            metavar="MULTIADDR",
            help="Address to publish instead of the listening ones, e.g. /ip4/203.0.113.7/tcp/31337 behind a forwarded"
            " port. May be given several times.",
        ),
        *(_REACH[name] for name in others),
    )


def text_options(what: str) -> Callable[[Command], Command]:
    """Add --data, described by `what`, and --text-field. The command gets both as `text`."""

    def checked(context: click.Context, parameter: click.Parameter, name: str | None) -> str:
        if name is None:
            return ""
        if not (name.isprintable() and 0 < len(name) <= _FIELD_CHARS_MAX) or set(name) & set('\\"'):
            raise click.BadParameter(
                f"{name[:_FIELD_CHARS_MAX]!r} names no field:"
                f" give 1 to {_FIELD_CHARS_MAX} printable letters, without quote or backslash"
            )
        return name

    field = "The field of JSON objects, and column of .parquet files, that holds the text.  [default: text]"
    return _handed_as(
        "text",
        lambda data, text_field: OwnText("" if data is None else str(data), text_field),
        click.option("--data", type=click.Path(path_type=Path, exists=True), metavar="PATH", help=what),
        click.option("--text-field", metavar="NAME", callback=checked, help=field),
    )


class Number(click.FloatRange):
    """A finite number in a range. Every option that takes a number which may have a fraction is of this type."""

    def __init__(self, least: float, most: float, min_open: bool = False) -> None:
        super().__init__(least, most, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):  # neither below nor above any bound
            self.fail(f"{value} is no finite number: give one from {self.min:g} to {self.max:g}", param, ctx)
        return number


def amount_option(name: str, unit: str, what: str) -> Callable[[Command], Command]:
    """Add an option for a number of MB/s, GB or Mbit/s above 0, described by `what`."""
    return click.option(name, type=Number(0, _AMOUNT_MAX, min_open=True), metavar=unit, help=what)


def count_option(name: str, least: int, most: int, default: int, what: str) -> Callable[[Command], Command]:
    """Add an option for a whole number between these, described by `what`."""
    return click.option(name, type=click.IntRange(least, most), default=default, show_default=True, help=what)


def threads_option(what: str) -> Callable[[Command], Command]:
    """Add --threads, described by `what`."""
    return click.option("--threads", type=click.IntRange(1, _THREADS_MAX), help=f"{what}  [default: all cores]")


def _compute(
    device: str | None,
    devices: str | None,
    layout: str | None,
    threads: int | None = None,
    compiles: bool = False,
    dtype: ComputeType | None = None,
    weights: MasterType = "fp32",
    **limits: float | None,
) -> Compute:
    """Return what the options say together; the limits are in GB. Raises ConfigError for a list that is none."""
    if devices is None and layout is not None:
        raise click.UsageError("--layout was given without --devices: it is for several devices, name them.")
    if devices is not None and device is not None:
        raise click.UsageError("--device and --devices were both given: --devices is for several, --device for one.")
    names = (device or "auto",) if devices is None else parse_devices(devices)
    if layout is not None:
        if len(names) == 1:
            raise click.UsageError("--layout was given with one of --devices: it is for several devices, name them.")
        Layout.parse(layout, len(names), fits=lambda layout: True)  # a typo is told at once
    if compiles and len(names) > 1:
        raise click.UsageError("--compile was given with several --devices: it is for one, leave it out.")
    if weights == "split" and len(names) > 1:
        raise click.UsageError("--weights split was given with several --devices: it is for one, leave it out.")
    several = names if len(names) > 1 else ()
    memory, host_memory = (limits.get(name) for name in ("memory_limit", "host_memory_limit"))
    return Compute(
        names[0],
        several,
        layout or "auto",
        threads,
        compiles,
        None if memory is None else memory * 1e9,
        None if host_memory is None else host_memory * 1e9,
        dtype,
        weights,
    )


def weights_option(what: str) -> Callable[[Command], Command]:
    """Add --weights, how a device that trains holds the weights, described by `what`."""
    return click.option("--weights", type=click.Choice(["fp32", "split"]), default="fp32", show_default=True, help=what)


_DEVICES: Final = (
    click.option("--device", help="auto, cpu, cuda, cuda:1, mps, ...  [default: auto]"),
    click.option(
        "--devices", metavar="LIST", help="Several: GPUs by number such as 0,1, or cpu:2 for processes on the CPU."
    ),
    click.option(
        "--layout",
        metavar="LAYOUT",
        help="With --devices, how they share the model: auto, ddp, fsdp, tp, or sizes such as fsdp:2,tp:2.  [default:"
        " auto]",
    ),
)
device_options: Final = _handed_as("compute", _compute, *_DEVICES)
compute_options: Final = _handed_as(
    "compute",
    _compute,
    *_DEVICES,
    threads_option("CPU threads for training."),
    click.option("--compile", "compiles", is_flag=True, help="Use torch.compile, which runs a compiler here."),
    amount_option(
        "--memory-limit",
        "GB",
        "The device's memory for training: a GPU's, or without one the machine's.  [default: what is free]",
    ),
    amount_option(
        "--host-memory-limit", "GB", "Beside a GPU: the machine's memory for training.  [default: what is free]"
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "fp32", "bf16", "fp16"]),
        help="The type of matrix products on this machine.  [default: the run's]",
    ),
    weights_option(
        "How the device holds the weights: split is bf16 with a correction of its rounding, in 3 bytes instead of 4,"
        " and without copies for bf16 products."
    ),
)


def tied_option(function: Command) -> Command:
    """Add the hidden --tied: leave when standard input ends. For parents such as `peer quickstart`."""
    return click.option("--tied", is_flag=True, hidden=True)(function)


def served_config(folder: Path) -> tuple[ModelConfig, Quantization | None]:
    """Return the shape of the model of a checkpoint that is to be served, and how its weights are quantized. Raises
    CheckpointError, ConfigError."""
    from peer.errors import CheckpointError
    from peer.files import read_bounded
    from peer.model.hub_config import CONFIG_BYTES_MAX, read_served_config, saved_quantization

    path = folder / "config.json"
    try:
        content = read_bounded(path, CONFIG_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint") from error
    return read_served_config(content)[0], saved_quantization(content)


def dtype_option(what: str) -> Callable[[Command], Command]:
    """Add --dtype, in which a served model is computed, described by `what`."""
    return click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help=what)


def quantize_option(what: str) -> Callable[[Command], Command]:
    """Add --quantize, in which the blocks of a served model are held, described by `what`."""
    return click.option("--quantize", type=click.Choice(["int8", "nf4"]), help=what)


def wire_option(function: Command) -> Command:
    """Add --wire, of the commands that use a served model."""
    types = click.Choice(["fp32", "bf16", "int8"])
    return click.option("--wire", type=types, help="The type of hidden states between servers.")(function)


def adapter_option(function: Command) -> Command:
    """Add --adapter, of the commands that ask a served model."""
    text = "Ask the model with this adapter, which its founder serves under this name."
    return click.option("--adapter", metavar="NAME", help=text)(function)


def template_option(what: str, default: str) -> Callable[[Command], Command]:
    """Add --template, described by `what`, of the commands that write conversations or found a model: the name of a
    template, a file or plain, which the model's text rules distinguish; None leaves the choice to them."""
    text = f"{what}: by a chat template of the checkpoint, one in a file (Jinja2), or plain.  [default: {default}]"
    return click.option("--template", metavar="NAME|FILE|plain", callback=_checked_template, help=text)


def _checked_template(context: click.Context, parameter: click.Parameter, chosen: str | None) -> str | None:
    """Read a path at once, so that a wrong one is told before a model is loaded; no name has a slash."""
    if chosen is not None and "/" in chosen:
        from peer.model.text.chat_templates import read_template_file

        read_template_file(Path(chosen))
    return chosen


def wait_option(function: Command) -> Command:
    """Add --wait, of the commands that show an answer to a person."""
    seconds, text = Number(0, 86400), "Seconds to wait for missing servers."
    return click.option("--wait", type=seconds, metavar="S", default=60, show_default=True, help=text)(function)


def home_option(what: str) -> Callable[[Command], Command]:
    """Add --home, described by `what`."""
    return click.option("--home", type=click.Path(path_type=Path, file_okay=False), help=what)
