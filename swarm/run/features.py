"""Features of the software that a manifest may require, so that peers without them refuse the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from optim.config import CodecConfig, LionConfig, OuterConfig
from peer.config import DataConfig, InnerConfig, ModelConfig, Quantization
from peer.errors import NotAdmitted
from swarm.run.sections import COMPUTE_S, RunRules

COMPUTE_CEILING: Final = "compute_s_max"
END_OF_TEXT: Final = "end_of_text"
ROPE_KIND: Final = "rope_kind"
OUTPUT_BIAS: Final = "output_bias"
BUNDLES: Final = "bundles"
SHARES: Final = "shares_by_link"
PAGES: Final = "pages"
MARKS_IN_STAGES: Final = "marks_in_stages"
LAYERED_BITS: Final = "lgreco_by_layer"
SUMMED_FACTORS: Final = "powersgd_summed"
TWO_BIT: Final = "two_bit"
SIGN_VOTES: Final = "lion_signs"
QUANTIZED: Final = "quantized_weights"
FP16: Final = "fp16"
ADAPTER: Final = "adapter"
ADAPTER_DROPOUT: Final = "adapter_dropout"
FEATURES: Final = frozenset(
    {
        COMPUTE_CEILING, END_OF_TEXT, ROPE_KIND, OUTPUT_BIAS, BUNDLES, SHARES, PAGES, LAYERED_BITS, SUMMED_FACTORS,
        TWO_BIT, SIGN_VOTES, QUANTIZED, FP16, ADAPTER, ADAPTER_DROPOUT, MARKS_IN_STAGES,
    }
)  # fmt: skip
"""Features that a manifest may require (`swarm.run.manifest.CommonManifest.requires`)."""


def check_features(required: Iterable[str]) -> None:
    """Raise NotAdmitted if a manifest requires a feature that is not known here."""
    unknown = sorted(set(required) - FEATURES)
    if unknown:
        raise NotAdmitted(
            f"the run needs {', '.join(map(ascii, unknown))}, which this software does not know: upgrade barnraise on"
            " this machine"
        )


def features_of(run: RunRules, data: DataConfig, stages: int = 1) -> tuple[str, ...]:
    """Return what the rules require of the software of each peer."""
    needed = {
        COMPUTE_CEILING: run.compute_s_max != COMPUTE_S,
        END_OF_TEXT: bool(data.end_of_text),
        PAGES: data.source == "pages",
        MARKS_IN_STAGES: data.has_marks and stages > 1,
    }
    return tuple(name for name, needs in needed.items() if needs)


def inner_features(inner: InnerConfig) -> tuple[str, ...]:
    """Return what the inner steps require of the software of each peer."""
    return (FP16,) if inner.dtype == "fp16" else ()


def model_features(model: ModelConfig) -> tuple[str, ...]:
    """Return what the model requires of the software of each peer."""
    scaling = model.rope_scaling
    needed = {
        ROPE_KIND: scaling is not None and scaling.kind != "llama3",
        OUTPUT_BIAS: model.output_bias,
        ADAPTER: model.adapter is not None,
        ADAPTER_DROPOUT: model.adapter is not None and model.adapter.dropout > 0,
    }
    return tuple(name for name, needs in needed.items() if needs)


def message_features(outer: OuterConfig, codec: CodecConfig) -> tuple[str, ...]:
    """Return what a method with its codecs requires of the software of each peer: messages in a form that older
    software lacks."""
    needed = {
        LAYERED_BITS: codec.up == "lgreco",
        SUMMED_FACTORS: codec.up == "powersgd",
        TWO_BIT: "two_bit" in (codec.up, codec.down),
        SIGN_VOTES: isinstance(outer, LionConfig),
    }
    return tuple(name for name, needs in needed.items() if needs)


def weight_features(quantization: Quantization | None) -> tuple[str, ...]:
    """Return what the stored weights of a served model, or of a base, require of the software of each peer."""
    return () if quantization is None else (QUANTIZED,)


def adapter_features(adapters: Sequence[object]) -> tuple[str, ...]:
    """Return what the adapters of a served model require of the software of each server."""
    return (ADAPTER,) if adapters else ()
