"""config.json of a Hugging Face checkpoint, in and out. Its content is typed and bounded: strangers write it."""

from __future__ import annotations

import math
from typing import Any, Final, get_args

import msgspec

from peer.config import HiddenType, ModelConfig, Quantization, RopeKind, RopeScaling
from peer.decoding import MALFORMED, decode_json, malformed, told
from peer.errors import ConfigError

CONFIG_BYTES_MAX: Final = 64 << 10
_MSCALE_MAX: Final = 1000.0
_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
_BIASED: Final = ("llama", "qwen3")
_ORIGINAL: Final = (
    "the model in bfloat16 or float16 that it was made from, which its model card names as base_model (hf download"
    " OWNER/NAME; peer serve --model OWNER/NAME --quantize nf4)"
)
_CODE: Final = ("auto_map", "custom_pipelines", "trust_remote_code")


_SIZES: Final[dict[str, Any]] = {"num_attention_heads": 32, "num_hidden_layers": 32, "hidden_size": 4096}
_QWEN: Final[dict[str, Any]] = {
    **_SIZES,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "llama": {**_SIZES, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        **_SIZES,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
"""The meaning of a field that config.json leaves out: the defaults of the families' classes in transformers."""


class _Kind(msgspec.Struct):
    """The part decoded first: a model of another family has other fields."""

    model_type: str = ""
    auto_map: Any = None
    custom_pipelines: Any = None
    trust_remote_code: Any = None


class _Rope(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    partial_rotary_factor: float | None = None


class _HubConfig(msgspec.Struct):
    """A config.json of transformers 4 or 5, with the family's defaults."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    original_max_position_embeddings: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    partial_rotary_factor: float | None = None


class _Quantized(msgspec.Struct):
    """The quantization of a config.json."""

    quantization_config: Any = None


class _Typed(msgspec.Struct):
    """The type of the weights of a config.json, by its old name and its new one."""

    torch_dtype: Any = None
    dtype: Any = None


def saved_type(content: bytes) -> HiddenType:
    """Return the type that a config.json names: "bf16", or "fp32" for what is held in it (`own_dtype` looks at the
    weights)."""
    found = decode_json(content, _Typed)
    return "bf16" if "bfloat16" in (found.torch_dtype, found.dtype) else "fp32"


def read_hub_config(content: bytes) -> ModelConfig:
    """Return the ModelConfig of a config.json, for training. Raises ConfigError, also for a setting that this decoder
    would compute differently."""
    model = read_base_config(content)
    if saved_quantization(content) is not None:
        raise ConfigError(
            "the checkpoint is quantized: train one in float32, bfloat16 or float16, or tune an adapter of it, with"
            " [model] base"
        )
    return model


def read_base_config(content: bytes) -> ModelConfig:
    """As `read_hub_config`, for training an adapter: the weights may be quantized."""
    model, window = read_served_config(content)
    if window is None:
        return model
    # within the window, sliding and full attention are equal
    return msgspec.structs.replace(model, max_seq_len=min(model.max_seq_len, window))


def read_served_config(content: bytes) -> tuple[ModelConfig, int | None]:
    """Return the ModelConfig of a config.json and the window of its attention in tokens, None for all. Raises as
    `read_hub_config`."""
    try:
        kind = decode_json(content, _Kind)
        for key in _CODE:
            if getattr(kind, key) is not None:
                raise ConfigError(f"config.json sets {key}, which names code to run: choose a model without code")
        if kind.model_type not in _FAMILIES:
            missing = "" if kind.model_type else ", or write the one that it is of into config.json"
            raise ConfigError(
                f"model_type is {kind.model_type[:40]!r}: choose a model of {', '.join(_FAMILIES)}{missing}"
            )
        fields = _DEFAULTS[kind.model_type] | decode_json(content, dict[str, Any])
        raw = msgspec.convert(fields, type=_HubConfig)
    except MALFORMED as error:
        raise ConfigError(f"config.json {malformed(content, error)}") from error
    for key, plain in (("mlp_bias", False), ("hidden_act", "silu")):
        if getattr(raw, key) != plain:
            found = str(getattr(raw, key))[:40]
            raise ConfigError(f"config.json sets {key} to {found!r}: choose a model with {plain!r}")
    try:
        return _model_config(kind.model_type, raw), _window(kind.model_type, raw)
    except ValueError as error:
        raise ConfigError(f"config.json describes no supported model ({told(error)}): choose another") from error


def saved_quantization(content: bytes) -> Quantization | None:
    """Return how the weights of a config.json are quantized; None: not at all. Raises ConfigError for a quantization
    that is not read here, with what to do instead."""
    found = decode_json(content, _Quantized).quantization_config
    if found is None:
        return None
    settings = found if isinstance(found, dict) else {}
    by_bits = any(settings.get(f"load_in_{bits}bit") for bits in (4, 8))  # old files name no method
    if settings.get("quant_method", "bitsandbytes" if by_bits else "") == "bitsandbytes":
        if settings.get("load_in_8bit"):
            return "int8"
        kind = str(settings.get("bnb_4bit_quant_type", "fp4"))[:8]
        if settings.get("load_in_4bit") and kind == "nf4":
            return "nf4"
        raise ConfigError(
            f"the checkpoint is quantized (bitsandbytes, {kind}): take one in int8 or nf4, or {_ORIGINAL}"
        )
    method = str(settings.get("quant_method", "by quantization_config") if settings else found)[:40]
    raise ConfigError(f"the checkpoint is quantized ({method}): take {_ORIGINAL}")


def chosen_quantization(saved: Quantization | None, wanted: Quantization | None) -> Quantization | None:
    """Return how a model is served whose checkpoint is quantized as `saved`, or not. Raises ConfigError."""
    if saved is not None and wanted not in (None, saved):
        raise ConfigError(f"the checkpoint is quantized in {saved}: drop --quantize, or take one in bf16")
    return saved or wanted


def _model_config(family: str, raw: _HubConfig) -> ModelConfig:
    rope = _merged_rope(raw)
    biased = raw.attention_bias and family in _BIASED  # the classes of the other families do not read it
    max_seq_len = raw.max_position_embeddings
    if family != "mistral" and raw.use_sliding_window and raw.sliding_window is not None:
        max_seq_len = min(max_seq_len, raw.sliding_window)  # only some layers of Qwen have a window: stay within it
    return ModelConfig(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        intermediate_size=raw.intermediate_size,
        max_seq_len=max_seq_len,
        head_dim=raw.head_dim,
        rope_theta=rope.rope_theta or raw.rope_theta or 10000.0,
        rope_scaling=_rope_scaling(rope, raw.max_position_embeddings),
        norm_eps=raw.rms_norm_eps,
        qk_norm=family == "qwen3",
        attention_bias=family == "qwen2" or biased,
        output_bias=biased,
        tie_embeddings=raw.tie_word_embeddings,
    )


def _window(family: str, raw: _HubConfig) -> int | None:
    if family != "mistral" or raw.sliding_window is None:
        return None
    if raw.sliding_window < 1:
        raise ValueError(f"sliding_window is {raw.sliding_window}: set it to at least 1")
    return raw.sliding_window


def _merged_rope(raw: _HubConfig) -> _Rope:
    """Return the rotary settings, of which transformers 4 and 5 have one name each; the newer one wins."""
    older, newer = raw.rope_scaling or _Rope(), raw.rope_parameters or _Rope()
    rope = _Rope(
        *(
            getattr(older, field) if getattr(newer, field) is None else getattr(newer, field)
            for field in _Rope.__struct_fields__
        )
    )
    rope.partial_rotary_factor = rope.partial_rotary_factor or raw.partial_rotary_factor
    if raw.original_max_position_embeddings is not None:  # transformers lets it win
        rope.original_max_position_embeddings = raw.original_max_position_embeddings
    return rope


def _rope_scaling(rope: _Rope, longest: int) -> RopeScaling | None:
    """Return the scaling that a config.json asks for, whose model is for `longest` tokens."""
    kind = rope.rope_type or rope.type or "default"
    if rope.partial_rotary_factor not in (None, 1.0):
        raise ConfigError(
            f"config.json sets partial_rotary_factor to {rope.partial_rotary_factor}: choose a model that rotates all"
        )
    if kind == "default":
        return None
    if kind not in get_args(RopeKind):
        raise ConfigError(
            f"config.json asks for {kind[:40]!r} rotary scaling: choose a model with {', '.join(get_args(RopeKind))},"
            " or without"
        )
    original = rope.original_max_position_embeddings
    if kind == "yarn":
        return _yarn(rope, longest if original is None else original, longest)
    if rope.factor is None:
        raise ConfigError(
            f"config.json lacks the factor of {kind}'s rotary scaling: add the one that the model was trained with to"
            " rope_scaling"
        )
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.factor)
    if kind == "dynamic":  # transformers takes the model's length as that of pre-training
        return RopeScaling(kind="dynamic", factor=rope.factor, original_max_seq_len=longest)
    slow, fast = rope.low_freq_factor, rope.high_freq_factor
    if slow is None or fast is None:
        field = "low_freq_factor" if slow is None else "high_freq_factor"
        raise ConfigError(
            f"config.json lacks the {field} of llama3's rotary scaling: add the one that the model was trained with to"
            " rope_scaling"
        )
    return RopeScaling(
        factor=rope.factor,
        low_freq_factor=slow,
        high_freq_factor=fast,
        original_max_seq_len=longest if original is None else original,
    )


def _yarn(rope: _Rope, original: int, longest: int) -> RopeScaling:
    """Return YaRN's scaling with its defaults; `mscale`, DeepSeek's way to the attention factor, is not kept."""
    if original < 1:
        raise ValueError(f"original_max_position_embeddings is {original}: it must be at least 1")
    factor = longest / original if rope.factor is None else rope.factor
    times = rope.attention_factor
    if times is None and rope.mscale and rope.mscale_all_dim:
        times = _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=original,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        attention_factor=times,
        truncate=rope.truncate is not False,
    )


def _mscale(factor: float, mscale: float) -> float:
    if not 0.0 < mscale <= _MSCALE_MAX:
        raise ValueError(f"mscale is {mscale}: it must lie between 0 and {_MSCALE_MAX}")
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def hub_config(config: ModelConfig) -> dict[str, Any]:
    """Return a config.json for transformers 4 and 5: the rotary settings stand under both versions' names."""
    family = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias and not config.output_bias else "llama"
    rope = {"rope_type": "default"} if config.rope_scaling is None else _hub_rope(config.rope_scaling)
    return {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": _longest(config),
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        **({"attention_bias": True} if config.output_bias else {}),
        "tie_word_embeddings": config.tie_embeddings,
    }


def _longest(config: ModelConfig) -> int:
    """Return the length that config.json names: of the kind "dynamic" that of pre-training, where scaling begins."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic" and scaling.original_max_seq_len is not None:
        return scaling.original_max_seq_len
    return config.max_seq_len


def _hub_rope(scaling: RopeScaling) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        if scaling.attention_factor is not None:
            rope["attention_factor"] = scaling.attention_factor
    return rope
