"""`peer plan`: count what a run would take of a machine, and how fast it would go."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import click
import msgspec

from cli.combinations import refuse_beside, refuse_without
from cli.homes import default_home
from cli.known_homes import homes_called
from cli.options import (
    checkpoint_folder,
    count_option,
    dtype_option,
    invite_argument,
    quantize_option,
    read_invite,
    served_config,
    weights_option,
)
from cli.run import run_until_stopped, stopping_by_signal
from cli.terminal.lines import say, say_json
from peer.config import DataConfig, InnerConfig, ModelConfig, StorageConfig
from peer.errors import ConfigError
from peer.footprint.cards import CARDS, Card
from peer.footprint.layout import Layout
from peer.machine import memory_bytes
from swarm.run.invite import PREFIX

if TYPE_CHECKING:
    from peer.config import HiddenType, MasterType, Quantization
    from peer.footprint.workload import DeviceKind
    from swarm.pages.sizes import DataSetPlan
    from swarm.placement.costs import RunShape
    from swarm.placement.machine_plan import Machine
    from swarm.run.config import RunConfig
    from swarm.run.invite import Invite
    from swarm.run.manifest import AnyManifest, ServedModelManifest
    from swarm.run.sections import RunRules

_SIZES: Final = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_RATES: Final = {"": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_COUNTS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


class Quantity(click.ParamType[float]):
    """A number above 0 with a unit, such as 24GB."""

    def __init__(self, name: str, units: dict[str, float]) -> None:
        self.name, self._units = name, units

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)(?:/s)?\s*", value)
        unit = None if found is None else self._units.get(found[2].lower())
        if found is None or unit is None or not 0 < float(found[1]) * unit < 1e30:
            units = ", ".join(name for name in self._units if name)
            self.fail(f"{value!r} is no {self.name}: give a number above 0 and a unit of {units}", param, ctx)
        return float(found[1]) * unit


@click.command()
@invite_argument(required=False)
@click.option("--device-memory", type=Quantity("size", _SIZES), help="Of the GPU, e.g. 24GB.  [default: this one's]")
@click.option("--host-memory", type=Quantity("size", _SIZES), help="E.g. 32GB.  [default: this machine's]")
@click.option("--device", "card", help=f"A card by name, for memory and speed: {', '.join(CARDS)}; or cpu.")
@count_option("--cards", 1, 64, 1, "Such devices in one peer.")
@click.option("--layout", default="auto", show_default=True, help="How they share the model, as for `peer join`.")
@weights_option("How they hold the weights, as for `peer join`.")
@click.option(
    "--flops", type=Quantity("rate", _COUNTS), help="FLOP/s kept up in training, e.g. 60T.  [default: measured]"
)
@click.option("--link", type=Quantity("rate", _RATES), default="100mbit", show_default=True, help="Up and down.")
@count_option("--peers", 1, 1024, 16, "Peers like this one.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The data set of a RUN.toml, as for `peer coordinate`.",
)
@click.option("--tokens", type=Quantity("number", _COUNTS), help="To train on, e.g. 20B.  [default: 20 a parameter]")
@click.option("--serve", is_flag=True, help="Count what serving the model would take, instead of training it.")
@quantize_option("With --serve: hold the blocks in 8 or 4 bits.  [default: as the checkpoint is]")
@dtype_option("With --serve: of what is not quantized.  [default: bf16]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every item in bytes.")
def plan(
    invite: str | None,
    device_memory: float | None,
    host_memory: float | None,
    card: str | None,
    cards: int,
    layout: str,
    weights: MasterType,
    flops: float | None,
    link: float,
    peers: int,
    data: Path | None,
    tokens: float | None,
    serve: bool,
    quantize: Quantization | None,
    dtype: HiddenType | None,
    as_json: bool,
) -> None:
    """Count what a run would take of a machine's device, memory and disk, and how fast it would go.

    The run is a RUN.toml, an INVITE, the home of a peer, or a Hugging Face checkpoint (its folder, or the OWNER/NAME of
    one that was downloaded; trained with DiLoCo and the defaults). Without any, it is run.toml of this folder.
    Only an INVITE needs a network. The exit code is 0 also where the run does not fit.
    """
    refuse_without("several --cards", cards > 1 or layout == "auto", "layout")
    refuse_beside("--device cpu", card == "cpu", "device_memory", why="a CPU has --host-memory")
    refuse_without("--serve", serve, "quantize", "dtype")
    refuse_beside("--serve", serve, "cards", "layout", "weights", "flops", "link", "peers", "data", "tokens")
    if serve:
        _plan_serving(invite or "run.toml", card, device_memory, host_memory, quantize, dtype, as_json)
        return
    from cli.views.plan import show_plan
    from swarm.placement.machine_plan import check_layout, plan_for

    source = invite or "run.toml"
    if data is not None and not source.endswith(".toml"):
        raise ConfigError(f"--data names the data set of a RUN.toml, and {source[:64]} is none: leave --data out")
    shape, rules, trained = _read(source, data)
    check_layout(shape, Layout.parse(layout, cards, fits=lambda layout: True), weights)  # before any measurement
    machine = _machine(shape, card, device_memory, host_memory, flops, link)
    machine = replace(machine, devices=cards, layout=layout, weights=weights)
    found = plan_for(shape, machine, peers, tokens, rules.compute_s_max, rules.max_peers)
    data_set = _data_set(shape, rules, max(1, peers // len(shape.cuts)), trained)
    if as_json:
        of_data = {} if data_set is None else {"data_set": msgspec.to_builtins(data_set)}
        say_json(msgspec.to_builtins(found) | of_data)
    else:
        show_plan(found, data_set)


def _plan_serving(
    source: str,
    card: str | None,
    device_memory: float | None,
    host_memory: float | None,
    quantize: Quantization | None,
    dtype: HiddenType | None,
    as_json: bool,
) -> None:
    """Print what serving the model of `source` takes. A model that is served is counted in its own types."""
    from cli.views.serving_plan import show_serving_plan
    from peer.footprint.parameters import base_of
    from peer.model.hub_config import chosen_quantization
    from swarm.run.hub_models import hub_id
    from swarm.run.manifest import ServedModelManifest
    from swarm.serving.memory import plan_serving

    source = _place(source)
    folder = Path(source)
    if not os.path.isdir(source) and not source.endswith(".toml") and hub_id(source):
        folder = checkpoint_folder(source)
    if (folder / "config.json").is_file():
        model, saved = served_config(folder)
        quantize = chosen_quantization(saved, quantize)
    elif (found := _agreed(source)) is None:
        model = _read(source)[0].model
    else:
        manifest, _ = found
        model = base_of(manifest.model)
        if isinstance(manifest, ServedModelManifest):
            dtype, quantize = _served_types(manifest, dtype, quantize)
        elif manifest.base is not None:
            dtype, quantize = manifest.base.dtype, manifest.base.quantization
    kind, size = _serving_memory(card, device_memory, host_memory)
    planned = plan_serving(model, dtype or "bf16", quantize, kind, size)
    if as_json:
        say_json(msgspec.to_builtins(planned) | {"servers": planned.servers})
    else:
        show_serving_plan(planned)


def _served_types(
    manifest: ServedModelManifest, dtype: HiddenType | None, quantize: Quantization | None
) -> tuple[HiddenType, Quantization | None]:
    """Return the types in which a model is served. Raises ConfigError if others are asked for."""
    for option, wanted, own in (
        ("--dtype", dtype, manifest.dtype),
        ("--quantize", quantize, manifest.quantization),
    ):
        if wanted not in (None, own):
            kind = own or f"{manifest.dtype}, not quantized"
            raise ConfigError(f"{manifest.name!r} is served in {kind}: drop {option}, or name its checkpoint")
    return manifest.dtype, manifest.quantization


def _serving_memory(
    card: str | None, device_memory: float | None, host_memory: float | None
) -> tuple[DeviceKind, float]:
    """Return the device that serves, and its memory; what the options leave out is this machine's."""
    if card == "cpu" or (host_memory is not None and card is None and device_memory is None):
        return "cpu", host_memory or memory_bytes()
    known = _known_card(card)
    if known is not None or device_memory is not None:
        return "cuda", device_memory or (known.memory_bytes if known is not None else 0.0)
    from peer.compute.device import resolve_device

    size = resolve_device("auto").memory_bytes
    return ("cuda", size) if size else ("cpu", memory_bytes())


def _data_set(shape: RunShape, rules: RunRules, trainers: int, trained: int | None) -> DataSetPlan | None:
    """Return what the run's data set takes; None without one. `trained`: tokens so far, if known."""
    from optim.config import AllReduceConfig
    from swarm.pages.sizes import DataSetSizes, plan_data_set

    sizes = DataSetSizes.of(shape.data)
    if sizes is None:
        return None
    outer, each = shape.outer, shape.outer.steps * shape.inner.batch_size
    samples = outer.batch if isinstance(outer, AllReduceConfig) else each * trainers
    windows = None if trained is None else trained // shape.data.seq_len
    return plan_data_set(sizes, samples, trainers, rules.rounds, default_home("peer"), windows)


def _read(source: str, data: Path | None = None) -> tuple[RunShape, RunRules, int | None]:
    """Return the shape and the limits of the run that `source` names, and the tokens that it has trained on if that is
    known. `data`: the data set of a RUN.toml."""
    from swarm.placement.costs import RunShape
    from swarm.run.hub_models import hub_id
    from swarm.run.manifest import Manifest

    source = _place(source)
    path, agreed = Path(source), _agreed(source)
    if agreed is not None:
        manifest, trained = agreed
        if not isinstance(manifest, Manifest):
            raise ConfigError(f"{manifest.name!r} is a served model, not a training run: add --serve")
        return RunShape.of(manifest), manifest.run, trained
    if os.path.isdir(source):
        return _from_config(_checkpoint_run(path), path)
    if not source.endswith(".toml") and hub_id(source):
        folder = checkpoint_folder(source)
        return _from_config(_checkpoint_run(folder), folder)
    from swarm.run.config import read_run_config

    run = read_run_config(path)
    if data is not None:
        from swarm.coordinator.data_set import with_data_set

        run = with_data_set(run, data)
    return _from_config(run, path)


def _place(source: str) -> str:
    """Return the path of the home with that name; return any other text unchanged."""
    named = [] if os.path.exists(source) else homes_called(source)
    return str(named[0].path) if named else source


def _agreed(source: str) -> tuple[AnyManifest, int | None] | None:
    """Return the manifest of the run or served model whose home or invite `source` is, and the tokens that it has
    trained on if that is known; None for a checkpoint and a RUN.toml. Raises ConfigError for another folder."""
    from swarm.run.hub_models import hub_id
    from swarm.run.manifest import open_any_manifest
    from swarm.run.manifest_transfer import load_run_files

    if os.path.isdir(source):
        if (Path(source) / "config.json").is_file():
            return None
        kept = load_run_files(Path(source))
        if kept is None:
            raise ConfigError(f"{source} holds neither config.json nor a run: name a checkpoint or a peer's home")
        return open_any_manifest(kept[0]), None
    if source.endswith(".toml") or hub_id(source):
        return None
    if source.lower().startswith(PREFIX) or os.path.isfile(source):
        invite = read_invite(source)
        return run_until_stopped(lambda: _manifest_and_tokens(invite))
    return None


async def _manifest_and_tokens(invite: Invite) -> tuple[AnyManifest, int | None]:
    """Return the rules of a run or a served model, and the tokens that a run has trained on so far if these are of a
    data set."""
    from swarm.client.session import open_client
    from swarm.inference.record import run_schemas
    from swarm.run.manifest import Manifest
    from swarm.status.reading import read_run

    async with open_client(invite, schemas=run_schemas) as client:
        manifest = client.manifest
        if not isinstance(manifest, Manifest) or manifest.data.pages is None:
            return manifest, None
        return manifest, (await read_run(client)).progress[1]


def _checkpoint_run(folder: Path) -> RunConfig:
    """Return a run with the defaults that starts from a checkpoint."""
    from optim.config import DilocoConfig
    from swarm.run.config import Pretrained, RunConfig
    from swarm.run.sections import RunRules

    length = min(2048, _hub_model(folder).max_seq_len)
    return RunConfig(
        run=RunRules(name="plan"),
        data=DataConfig(seq_len=length),
        inner=InnerConfig(lr=1e-3, batch_size=8, total_steps=1),
        outer=DilocoConfig(steps=100),
        pretrained=Pretrained(init=str(folder)),
    )


def _hub_model(folder: Path) -> ModelConfig:
    from peer.model.hub_config import read_hub_config

    return read_hub_config(_config_of(folder))


def _tuned(run: RunConfig, folder: Path) -> tuple[ModelConfig, StorageConfig]:
    """Return the base in `folder` with the run's adapter, and the form of the base."""
    from peer.model.hub_config import chosen_quantization, read_base_config, saved_quantization, saved_type

    assert run.pretrained is not None
    content = _config_of(folder)
    model = msgspec.structs.replace(read_base_config(content), adapter=run.adapter)
    quantization = chosen_quantization(saved_quantization(content), run.pretrained.quantize)
    return model, StorageConfig(dtype=saved_type(content), quantization=quantization)


def _config_of(folder: Path) -> bytes:
    from peer.files import read_bounded
    from peer.model.hub_config import CONFIG_BYTES_MAX

    try:
        return read_bounded(folder / "config.json", CONFIG_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read ({error.strerror}): name a checkpoint") from error


def _from_config(run: RunConfig, path: Path) -> tuple[RunShape, RunRules, int | None]:
    from swarm.placement.costs import RunShape, cut
    from swarm.run.hub_models import located

    model, base = run.model, None
    if model is None:
        assert run.pretrained is not None
        folder = located(run.pretrained.init)
        model, base = (_hub_model(folder), None) if run.adapter is None else _tuned(run, folder)
        if run.pipeline.stages > 1:
            model = msgspec.structs.replace(model, tie_embeddings=False)
    if run.data.seq_len > model.max_seq_len:
        raise ConfigError(f"{path}: seq_len is {run.data.seq_len}: choose at most the model's {model.max_seq_len}")
    cuts = cut(run.pipeline.stages, model, run.data.seq_len)
    shape = RunShape(model, run.data, run.inner, run.outer, run.codec, run.pipeline, cuts, base)
    return shape, run.run, None


def _known_card(card: str | None) -> Card | None:
    """Return the card of a name; None for cpu, and without one. Raises ConfigError for one that is not known."""
    known = CARDS.get((card or "").lower().replace(" ", "").replace("-", ""))
    if card is not None and known is None and card != "cpu":
        raise ConfigError(f"the card {card!r} is not known: choose one of {', '.join(CARDS)}, or cpu, or give --flops")
    return known


def _machine(
    shape: RunShape,
    card: str | None,
    device_memory: float | None,
    host_memory: float | None,
    flops: float | None,
    link: float,
) -> Machine:
    """Return the machine that the options describe; what they leave out is this machine's."""
    from swarm.placement.machine_plan import Machine

    known = _known_card(card)
    kind, narrow, memory = "cpu" if card == "cpu" else "cuda", shape.inner.dtype != "fp32", 0.0
    if known is not None:
        memory, flops = known.memory_bytes, flops or known.flops
    elif device_memory is None or flops is None:
        from cli.checks.speed import device_facts, measured_flops

        device = "cpu" if card == "cpu" else "auto"
        if device_memory is None:
            kind, narrow, memory = device_facts(device, shape.inner)
        if flops is None:
            with stopping_by_signal():
                say("Measuring this machine's speed ...", err=True)
                flops = measured_flops(shape.model, shape.inner, shape.data.seq_len, device)
    return Machine(
        cast("DeviceKind", kind), device_memory or memory, host_memory or memory_bytes(), flops, link, narrow
    )
