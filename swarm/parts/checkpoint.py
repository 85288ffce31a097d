"""A checkpoint whose values are served or trained beside, as its headers describe it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from peer.config import HiddenType, ModelConfig, Quantization
from peer.errors import CheckpointError
from peer.footprint.parameters import HEAD, Shape
from peer.footprint.stored import is_quantized
from peer.model.layout import FlatLayout
from peer.model.parameter_files import ParameterFiles
from peer.model.quantize import CODES
from peer.model.weight_files import missing_parameter


def check_names(folder: Path, files: ParameterFiles, config: ModelConfig) -> None:
    """Raise CheckpointError unless the files hold all parameters. The embedding is the head only of a model whose
    config.json ties it."""
    names = files.names if config.tie_embeddings or files.has_head else files.names - {HEAD}
    for name in FlatLayout.of(msgspec.structs.replace(config, tie_embeddings=False)).slots:
        if name not in names:
            raise missing_parameter(folder, name, names)


def own_dtype(files: ParameterFiles, model: ModelConfig, quantization: Quantization | None) -> HiddenType:
    """Return the type of a checkpoint: bf16 where all parameters are of it, those left out that are quantized. Raises
    CheckpointError for another type than a floating one."""
    kinds = {
        str(files.tensor(name).dtype)
        for name, slot in FlatLayout.of(model).slots.items()
        if not _in_codes(files, name, slot.shape, quantization)
    }
    unfit = kinds - {"torch.float64", "torch.float32", "torch.bfloat16", "torch.float16"}
    if unfit:
        raise CheckpointError(
            f"the checkpoint has parameters of {sorted(unfit)[0]}: take one in float32, bfloat16 or float16"
        )
    return "bf16" if kinds == {"torch.bfloat16"} else "fp32"


def _in_codes(files: ParameterFiles, name: str, shape: Shape, quantization: Quantization | None) -> bool:
    """Whether a checkpoint holds a parameter in the codes of its quantization."""
    return quantization is not None and is_quantized(name, shape) and files.tensor(name).dtype == CODES[quantization]
