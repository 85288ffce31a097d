"""Models of `transformers` whose linear layers are bitsandbytes' own: the reference for quantized models."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from peer.config import Quantization


def quantized_copy(model: Any, quantization: Quantization, nested: bool = False) -> Any:
    """Return a copy of a model with bitsandbytes' linear layers in its blocks. `nested`: nf4 with quantized scales."""
    found = copy.deepcopy(model)
    for parent in list(found.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, _linear(child, quantization, nested))
    return found


def _linear(linear: torch.nn.Linear, quantization: Quantization, nested: bool) -> torch.nn.Module:
    sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
    weight = linear.weight.data
    layers: Any = importlib.import_module("bitsandbytes").nn
    if quantization == "int8":
        made = layers.Linear8bitLt(*sizes, bias=bias, has_fp16_weights=False, threshold=0.0)
        made.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
    else:
        made = layers.Linear4bit(*sizes, bias=bias, quant_type="nf4", compress_statistics=nested)
        made.weight = layers.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=nested).to(
            "cpu"
        )
        made.compute_dtype = weight.dtype
    if linear.bias is not None:
        made.bias = linear.bias
    return made.eval()


def save_quantized(model: Any, folder: Path, quantization: Quantization) -> None:
    """Write a model of `quantized_copy` over the checkpoint of the whole one in `folder`, as `transformers` does."""
    saved = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kinds: dict[Quantization, dict[str, object]] = {
        "int8": {"load_in_8bit": True},
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    }
    config["quantization_config"] = {"quant_method": "bitsandbytes"} | kinds[quantization]
    path.write_text(json.dumps(config))
