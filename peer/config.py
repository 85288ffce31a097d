"""The part of a run's manifest about compute: the model, the data, the inner optimizer.

Plain msgspec structs without torch, so that reading a manifest or printing `--help` costs milliseconds. An invalid
value raises ValueError on construction, which msgspec turns into a ValidationError with the field's path.

Strangers write manifests and checkpoints, so every number has a lower and an upper bound. A manifest names no path and
no command of the machine that reads it: which folder holds the text, and whether a compiler runs, is decided there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec

LAYERS_MAX: Final = 1 << 14
PARAMETERS_MAX: Final = 1 << 40
VOCABULARY_MAX: Final = 1 << 24
WeightType = Literal["fp32", "bf16", "fp16"]
ComputeType = Literal["auto", "fp32", "bf16", "fp16"]
"""Of weights at rest."""
HiddenType = Literal["fp32", "bf16"]
MasterType = Literal["fp32", "split"]
"""How a trainer holds the weights that its optimizer moves: split is bf16 with a correction of its rounding."""
"""In which a served model's parameters, hidden states and caches are held."""
Quantization = Literal["int8", "nf4"]
"""Of a served model's matrices (`peer.footprint.stored`)."""
TOKENS_MAX: Final = 1 << 24  # of one sequence
SEQUENCES_MAX: Final = 1 << 20  # of one step
STEPS_MAX: Final = 1 << 40  # of a whole run
TEXT_BYTES_MAX: Final = 1 << 36
_WIDTH_MAX: Final = 1 << 20
_SMALLEST: Final = 1e-30
_LARGEST: Final = 1e12


def check_range(struct: msgspec.Struct, low: float, high: float, *names: str) -> None:
    """Raise ValueError, beginning with the field's name, unless each of the fields is in [low, high]. NaN is not."""
    for name in names:
        value = getattr(struct, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}: set it between {low} and {high}")


def _check_positive(struct: msgspec.Struct, *names: str) -> None:
    for name in names:
        if not _SMALLEST <= getattr(struct, name) <= _LARGEST:
            raise ValueError(f"{name} is {getattr(struct, name)}: set it above 0 and at most {_LARGEST}")


RopeKind = Literal["llama3", "linear", "dynamic", "yarn"]
_FACTOR_MAX: Final = 1 << 24
_ROPE_NEEDS: Final[Mapping[RopeKind, tuple[str, ...]]] = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_seq_len"),
    "linear": (),
    "dynamic": ("original_max_seq_len",),
    "yarn": ("original_max_seq_len",),
}
_YARN: Final = ("beta_fast", "beta_slow", "attention_factor", "truncate")


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How the rotary frequencies reach contexts longer than in pre-training."""

    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_seq_len: int | None = None
    """The longest context in pre-training, in tokens; of all kinds but "linear"."""
    kind: RopeKind = "llama3"
    """Llama 3's (arXiv 2407.21783), which needs all settings above; "linear" divides every frequency by `factor`
    (2306.15595); "dynamic" changes nothing up to `original_max_seq_len`, and beyond it depends on the length of each
    text, so that `max_seq_len` ends there; "yarn" (2309.00071)."""
    beta_fast: float = 32.0
    """Of "yarn", as are those below: pairs with more turns than this within the original context stay as they are."""
    beta_slow: float = 1.0
    """Pairs with fewer turns are divided by `factor`."""
    attention_factor: float | None = None
    """The factor of cosine and sine. None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Whether the blend begins and ends at whole pairs."""

    def __post_init__(self) -> None:
        needed = _ROPE_NEEDS[self.kind]
        for name in _ROPE_NEEDS["llama3"]:
            if getattr(self, name) is None and name in needed:
                raise ValueError(f"{name} is missing: the kind {self.kind} needs it")
            if getattr(self, name) is not None and name not in needed:
                raise ValueError(f"{name} is no setting of the kind {self.kind}: leave it out")
        for field in msgspec.structs.fields(self):
            if field.name in _YARN and self.kind != "yarn" and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} is no setting of the kind {self.kind}: leave it out")
        if self.original_max_seq_len is not None:
            check_range(self, 1, TOKENS_MAX, "original_max_seq_len")
        if self.kind == "llama3":
            self._check_llama3()
            return
        check_range(self, 1, _FACTOR_MAX, "factor")
        check_range(self, 1e-3, 1e6, "beta_fast", "beta_slow")
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast is {self.beta_fast}: it must be at least beta_slow, {self.beta_slow}")
        if self.attention_factor is not None:
            check_range(self, 1e-3, 1e3, "attention_factor")

    def _check_llama3(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        assert self.low_freq_factor is not None and self.high_freq_factor is not None
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}: it must be above low_freq_factor, {self.low_freq_factor}"
            )


AdapterTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: Final[tuple[AdapterTarget, ...]] = get_args(AdapterTarget)
RANK_MAX: Final = 1 << 12


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA (arXiv 2106.09685): y = W x + alpha / rank B A x, with W frozen, A (rank, in) and B (out, rank)."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[AdapterTarget, ...] = TARGETS
    """The linear layers of each block that have an adapter, in the order of the decoder."""
    dropout: float = 0.0
    """The share of the values of x that A does not get while it is trained."""

    def __post_init__(self) -> None:
        check_range(self, 1, RANK_MAX, "rank")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: choose a share of at least 0 and below 1")
        _check_positive(self, "alpha")
        if not self.targets:
            raise ValueError(f"targets is empty: name some of {', '.join(TARGETS)}")
        if self.targets != tuple(name for name in TARGETS if name in self.targets):
            raise ValueError(f"targets are not in order, or not once each: write them as {', '.join(TARGETS)}")

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class StorageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The form of weights that stay as they are: their type, and that of the matrices inside of the blocks where they
    are quantized (`peer.footprint.stored`)."""

    dtype: HiddenType = "bf16"
    quantization: Quantization | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family."""

    vocab_size: int = 256
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_seq_len: int
    """The longest context, in tokens."""
    head_dim: int | None = None
    """None: hidden_size / heads."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    """An RMSNorm on each head of q and k (Qwen3)."""
    attention_bias: bool = False
    """Biases on q, k and v (Qwen2)."""
    output_bias: bool = False
    """A bias on the output of attention as well: with `attention_bias` what Hugging Face's Llama and Qwen3 call
    attention_bias."""
    tie_embeddings: bool = True
    shared_blocks: int = 1
    """The number of consecutive blocks that use the parameters of one (ALBERT's groups, arXiv 1909.11942), named after
    the first of them. A pipeline splits between groups only, so that every parameter is in one stage."""
    adapter: AdapterConfig | None = None
    """If set, the model's parameters are the adapter's alone, and its base is frozen."""

    def __post_init__(self) -> None:
        check_range(self, 1, VOCABULARY_MAX, "vocab_size")
        check_range(self, 1, _WIDTH_MAX, "hidden_size", "heads", "kv_heads", "intermediate_size")
        check_range(self, 1, LAYERS_MAX, "layers", "shared_blocks")
        check_range(self, 1, TOKENS_MAX, "max_seq_len")
        _check_positive(self, "rope_theta", "norm_eps")
        if self.rope_scaling is not None:
            self._check_rope(self.rope_scaling)
        if self.head_dim is not None:
            check_range(self, 2, _WIDTH_MAX, "head_dim")
        if self.layers % self.shared_blocks:
            raise ValueError(f"shared_blocks is {self.shared_blocks}: it must divide layers ({self.layers})")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: it must divide heads ({self.heads})")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(f"heads is {self.heads}: it must divide hidden_size ({self.hidden_size}), or set head_dim")
        if self.head_size <= 0 or self.head_size % 2:
            raise ValueError(f"head_dim is {self.head_size}: rotary embedding needs an even number above 0")
        if self.output_bias and not self.attention_bias:
            raise ValueError("output_bias is true: set attention_bias, too, as no model family has it alone")
        if self.qk_norm and self.attention_bias and not self.output_bias:
            raise ValueError(
                "qk_norm and attention_bias exclude each other unless output_bias is true: no model family has these"
            )
        if self.weights > PARAMETERS_MAX:
            raise ValueError(
                f"hidden_size is {self.hidden_size}: with the other sizes that makes {self.weights:.1e} parameters;"
                f" choose sizes that make at most {PARAMETERS_MAX:.1e}"
            )

    def _check_rope(self, scaling: RopeScaling) -> None:
        longest = scaling.original_max_seq_len
        if scaling.kind == "dynamic" and longest is not None and self.max_seq_len > longest:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}: beyond original_max_seq_len, {longest}, the rotary frequencies of"
                ' the kind dynamic depend on the length of each text; set at most that, or the kind "yarn"'
            )
        if scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta}: the kind yarn of rope_scaling needs more than 1")

    @property
    def weights(self) -> int:
        """The number of parameters but gains and biases, which are few beside these."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_size
        block = self.hidden_size * (attention + 3 * self.intermediate_size)
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.layers // self.shared_blocks * block

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim


class PagesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A data set of pages (`peer.data.pages`): its name and its sizes, which a peer knows before it has the index."""

    root: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """The hex blake3 of its index."""
    index_bytes: Annotated[int, msgspec.Meta(ge=1, le=4 << 20)]
    row_bytes: Annotated[int, msgspec.Meta(ge=1, le=4 << 20)]
    """Of a window of seq_len + 1 tokens."""
    windows: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    """To train on."""
    held_out_windows: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


class DataConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The training text: what every peer reads from its own disk, or one data set for all."""

    seq_len: int
    source: Literal["stdlib", "folder", "pages"] = "stdlib"
    """The text of the machine's Python standard library, or of a folder that the peer's own user names; or the pages of
    a data set, which the coordinator names with --data and peers fetch from each other."""
    validation_share: float = 0.05
    """The part of the text that is held out, in (0, 1)."""
    max_bytes: int = 256 << 20
    """The limit of text read into memory, in bytes of files; of a larger folder, the first of them in the order of
    paths, up to a line's end. A machine of little memory reads less."""
    end_of_text: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """The special token of the run's tokenizer that stands where a text ends, such as "</s>"; "" for an empty line.
    None is the same in a manifest; in RUN.toml it is the token that the checkpoint names. Of a data set it is that of
    its index."""
    pages: PagesConfig | None = None
    """In a manifest: the data set of the source "pages"."""

    @property
    def has_marks(self) -> bool:
        """Whether only some tokens of the data set count in the loss: a window has a bit for each then, beside ids of 2
        or 4 bytes (`peer.data.pages.index`)."""
        return self.pages is not None and self.pages.row_bytes % (self.seq_len + 1) != 0

    def __post_init__(self) -> None:
        check_range(self, 1, TOKENS_MAX, "seq_len")
        check_range(self, 1, TEXT_BYTES_MAX, "max_bytes")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share is {self.validation_share}: it must lie between 0 and 1")


class InnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The inner optimizer. Steps are the run's inner steps, not one peer's."""

    lr: float
    batch_size: int
    """Sequences a step."""
    total_steps: int
    optimizer: Literal["adamw", "adamw8bit", "lion", "lamb", "muon"] = "adamw"
    """AdamW; "adamw8bit", AdamW with moments of one byte a value, which needs bitsandbytes; Lion (arXiv 2302.06675),
    with a rate 3 to 10 times below AdamW's and betas near (0.9, 0.99); LAMB (1904.00962), for large batches; Muon,
    which orthogonalizes the blocks' matrices and leaves the rest to AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    """Not used by Lion."""
    weight_decay: float = 0.1
    """Of matrices; gains and biases do not decay."""
    clip_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    """ "cosine" warms up linearly over `warmup_steps`, then falls to `min_lr_share * lr` at `total_steps` and keeps
    that value. "constant" only warms up."""
    min_lr_share: float = 0.1
    dtype: ComputeType = "auto"
    """Of matrix products, unless a peer chooses for itself. "auto" is bf16 autocast if the device gains from it, else
    fp16 autocast with a scaled loss if it gains from that, else fp32."""
    momentum: float = 0.95
    """Of Muon, like the two settings below."""
    newton_schulz_steps: int = 5
    muon_scale: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """ "match_rms_adamw" (2502.16982) makes one rate right for both of Muon's parts."""

    def __post_init__(self) -> None:
        _check_positive(self, "lr", "eps", "clip_norm")
        check_range(self, 1, SEQUENCES_MAX, "batch_size")
        check_range(self, 1, STEPS_MAX, "total_steps")
        check_range(self, 0, 1000, "weight_decay")
        if not (0.0 <= self.betas[0] < 1.0 and 0.0 <= self.betas[1] < 1.0):
            raise ValueError(f"betas is {list(self.betas)}: both must lie in [0, 1)")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}: it must lie between 0 and total_steps, {self.total_steps}"
            )
        if not 0 <= self.min_lr_share <= 1:
            raise ValueError(f"min_lr_share is {self.min_lr_share}: it must lie between 0 and 1")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}: it must lie in [0, 1)")
        if not 1 <= self.newton_schulz_steps <= 20:
            raise ValueError(f"newton_schulz_steps is {self.newton_schulz_steps}: it must lie between 1 and 20")
