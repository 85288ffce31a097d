"""The rows of the convergence benchmark: every method, codec and inner optimizer that RUN.toml accepts."""

from __future__ import annotations

from typing import Any, Final, get_args

from benchmarks.training.byte_task import BATCH, WORKERS
from benchmarks.training.convergence_cell import Run
from benchmarks.training.liars import LIES
from optim import config
from optim.config import CodecConfig, DilocoConfig

FP32: Final = CodecConfig(up="fp32", down="fp32")
INT8: Final = CodecConfig(up="int8", down="int8")
INT4: Final = CodecConfig(up="int4", down="int4")
OUTER: Final[dict[str, Any]] = {"lr": 0.7, "momentum": 0.9}
QUICKER: Final[dict[str, Any]] = {"lr": 1.0, "momentum": 0.8}
"""An outer step that answers sooner, for runs of few rounds."""
MILDER: Final[dict[str, Any]] = {"lr": 0.3, "momentum": 0.5}
AVERAGE: Final[dict[str, Any]] = {"lr": 1.0, "momentum": 0.0}
"""The outer step that RUN.toml demands with powersgd: the mean of the weights."""
COSINE: Final[dict[str, Any]] = {"schedule": "cosine"}
TUNED_LR: Final = 4e-3  # of data parallel: the best of `RATES`
RATES: Final = (2e-3, 4e-3, 8e-3)
TWO_BIT: Final = CodecConfig(up="two_bit", down="two_bit")
TWO_BIT_UP: Final = CodecConfig(up="two_bit", down="int4")
MUON: Final[dict[str, Any]] = {"optimizer": "muon"}

DATA_PARALLEL, TUNED, ALONE = "data parallel", f"data parallel, lr {TUNED_LR:g}", "one worker alone"
GRID_H: Final = (8, 32, 120, 480)
SEEDS: Final = {"methods": 3, "codecs": 3, "rates": 1, "links": 1, "liars": 1}
"""Seeds of each group of rows."""


def rows() -> dict[str, dict[str, Run]]:
    """Return the rows of each group, by name."""
    return {"methods": methods(), "codecs": codecs(), "rates": rates(), "links": links(), "liars": liars()}


def methods() -> dict[str, Run]:
    """The methods, and the inner optimizers."""
    batch = WORKERS * BATCH
    all_workers = config.AllReduceConfig(batch=batch)
    optimizers: dict[str, dict[str, Any]] = {
        "adamw8bit": {"optimizer": "adamw8bit"},
        "Lion lr 3e-4": {"optimizer": "lion", "lr": 3e-4, "betas": (0.9, 0.99)},
        "LAMB lr 4e-3": {"optimizer": "lamb", "lr": 4e-3},
        "Muon": MUON,
    }
    int4 = {f"DiLoCo H=20 int4, {name}": _diloco(20, INT4, **changes) for name, changes in optimizers.items()}
    two_bit = {
        f"DiLoCo H={steps} two_bit, {name}": _diloco(steps, TWO_BIT, **changes)
        for name, changes in {"AdamW": {}, "Muon": MUON}.items()
        for steps in (20, 30)
    }
    two_bit |= {
        f"DiLoCo H={steps} two_bit up, int4 down, Muon": _diloco(steps, TWO_BIT_UP, **MUON) for steps in (20, 30)
    }
    quicker = {
        "DiLoCo H=20 int4, outer 1, .8": _run(DilocoConfig(steps=20, **QUICKER), INT4),
        "DiLoCo H=20 two_bit, Muon, outer 1, .8": _run(DilocoConfig(steps=20, **QUICKER), TWO_BIT, **MUON),
        "DiLoCo H=30 two_bit, Muon, outer 1, .8": _run(DilocoConfig(steps=30, **QUICKER), TWO_BIT, **MUON),
        f"DiLoCo H=30 two_bit, Muon lr {TUNED_LR:g}, outer 1, .8": _run(
            DilocoConfig(steps=30, **QUICKER), TWO_BIT, **MUON, lr=TUNED_LR
        ),
    }
    tuned = {
        f"DiLoCo H=20 int4, lr {TUNED_LR:g}": _diloco(20, INT4, lr=TUNED_LR),
        f"DiLoCo H=20 two_bit, Muon lr {TUNED_LR:g}": _diloco(20, TWO_BIT, **MUON, lr=TUNED_LR),
        f"DiLoCo H=30 two_bit, Muon lr {TUNED_LR:g}": _diloco(30, TWO_BIT, **MUON, lr=TUNED_LR),
    }
    streaming = {
        f"streaming H=60, mix {mix:g}": _run(
            config.StreamingConfig(steps=60, fragments=2, tau=2, mix=mix, **OUTER), INT4
        )
        for mix in (0.0, 0.5)
    }
    return {
        DATA_PARALLEL: _run(all_workers, FP32),
        TUNED: _run(all_workers, FP32, lr=TUNED_LR),
        "data parallel, LAMB lr 4e-3": _run(config.AllReduceConfig(batch=batch, optimizer="lamb"), FP32, lr=4e-3),
        "DiLoCo H=20 int4": _diloco(20, INT4),
        "DiLoCo H=60 int4": _diloco(60, INT4),
        "DiLoCo H=60 fp32": _diloco(60, FP32),
        "DiLoCo H>=20 quadratic": _run(
            DilocoConfig(steps=20, schedule="quadratic", alpha=3e-3, steps_max=60, **OUTER), INT4
        ),
        **int4,
        **two_bit,
        **quicker,
        **tuned,
        **streaming,
        "eager H=20 lr .3 m .5": _run(config.EagerConfig(steps=20, **MILDER), INT4),
        "NoLoCo H=20": _run(config.GossipConfig(steps=20), INT8),
        "SparseLoCo H=10 k=128 lr 1": _run(config.SparseLocoConfig(steps=10, topk=128, lr=1.0)),
        "SparseLoCo H=30 k=64 lr 1": _run(config.SparseLocoConfig(steps=30, lr=1.0)),
        "DeMo k=32": _run(config.DemoConfig(), weight_decay=0.0),
        f"DeMo k=32 lr {TUNED_LR:g}": _run(config.DemoConfig(), weight_decay=0.0, lr=TUNED_LR),
        f"DeMo k=128 lr {TUNED_LR:g}": _run(config.DemoConfig(topk=128), weight_decay=0.0, lr=TUNED_LR),
        f"DeMo k=32 lr {TUNED_LR:g}, by its authors in float64": Run(
            config.DemoConfig(), inner={**COSINE, "weight_decay": 0.0, "lr": TUNED_LR}, by_authors=True
        ),
        "Distributed Lion, majority": _run(config.LionConfig(), lr=3e-4),
        "Distributed Lion, average": _run(config.LionConfig(vote="average"), lr=3e-4),
        "PowerSGD r=4, every step (the paper's)": Run(all_workers, FP32, COSINE, powersgd_rank=4),
        **{
            f"DiLoCo H=20 powersgd r={rank}, outer 1, 0": _run(
                DilocoConfig(steps=20, **AVERAGE), CodecConfig(up="powersgd", down="int8", rank=rank)
            )
            for rank in (4, 8)
        },
        "DiLoCo H=20 topk, outer 1, .5": _run(
            DilocoConfig(steps=20, lr=1.0, momentum=0.5), CodecConfig(up="topk", down="int8")
        ),
        ALONE: Run(config.AllReduceConfig(batch=BATCH), FP32, COSINE, workers=1),
    }


def codecs() -> dict[str, Run]:
    """The codecs, each beside int8, in DiLoCo of 20 steps with AdamW."""
    up = {
        f"up {name}": _run(
            DilocoConfig(steps=20, **(AVERAGE if name == "powersgd" else OUTER)), CodecConfig(up=name, down="int8")
        )
        for name in get_args(config.UpCodec)
    }
    down = {f"down {name}": _diloco(20, CodecConfig(up="int8", down=name)) for name in get_args(config.DownCodec)}
    return {**up, **{name: run for name, run in down.items() if name != "down int8"}}


def rates() -> dict[str, Run]:
    """Data parallel at other rates: the search for the tuned one."""
    batch = config.AllReduceConfig(batch=WORKERS * BATCH)
    return {f"data parallel, lr {lr:g}": _run(batch, FP32, lr=lr) for lr in RATES if lr != TUNED_LR}


def links() -> dict[str, Run]:
    """The cells of the grid of thin links (`benchmarks/rounds/thin_links.py`)."""
    coded = {f"{name} H={steps}": _diloco(steps, codec) for name, codec in GRID.items() for steps in GRID_H}
    streamed = {
        f"streaming H={steps}": _run(config.StreamingConfig(steps=steps, fragments=2, **OUTER), INT4)
        for steps in GRID_H
    }
    return {**coded, **streamed}


def liars() -> dict[str, Run]:
    """The merge rules, with 0 to 3 liars of 8."""
    found = {}
    for rule in get_args(config.MergeName):
        method = DilocoConfig(steps=20, merge=rule, **OUTER)
        found[f"{rule}, honest"] = _run(method, INT8)
        for count in (1, 2, 3):
            for lie in LIES:
                found[f"{rule}, {count} {lie}"] = Run(method, INT8, COSINE, liars=count, lie=lie)
    return found


GRID: Final = {"fp32": FP32, "int8": INT8, "int4": INT4, "two_bit": TWO_BIT_UP}


def _run(method: config.OuterConfig, codec: CodecConfig | None = None, **changes: Any) -> Run:
    return Run(method, codec or CodecConfig(), {**COSINE, **changes})


def _diloco(steps: int, codec: CodecConfig, **changes: Any) -> Run:
    return _run(DilocoConfig(steps=steps, **OUTER), codec, **changes)
