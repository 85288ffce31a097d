"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in one readable file.

Shapes: B sequences, T tokens, C hidden_size, H query heads, K key/value heads, D head_size, V vocab_size.

Every parameter is a view into one flat fp32 vector (`FlatLayout`), and every gradient a view into a second one, so the
outer loop adds, clips, hashes and sends whole vectors. A trainer may hold the parameters in bf16 (`SplitVector`). Built
with a span of blocks, `Decoder` is one stage of the model: the first holds the embedding, the last the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from peer.config import AdapterConfig, AdapterTarget, DataConfig, InnerConfig, ModelConfig, RopeScaling
from peer.footprint.parameters import frozen_shapes
from peer.footprint.workload import Recompute
from peer.ipc.span import Span
from peer.model.frozen_weights import FrozenWeights, frozen_product
from peer.model.head_loss import head_losses
from peer.model.layout import FlatLayout, TensorSlot, init_flat
from peer.model.marks import ids_of
from peer.model.matrices import Matrix
from peer.model.rotary import rotary_table

__all__ = [
    "DataConfig",
    "Decoder",
    "FlatLayout",
    "InnerConfig",
    "ModelConfig",
    "RopeScaling",
    "TensorSlot",
    "init_flat",
]

_aten = torch.ops.aten
_PRODUCTS: Final = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding with Hugging Face's pairing (i with i + D/2). x (B, H, T, D); cos, sin (T, D/2)."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).type_as(x)


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: the flat vector brings the values, and random numbers on meta cost a second of imports."""

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.bias)


class FrozenLinear(Linear):
    """A linear layer of a base model."""

    matrix: Matrix | None = None
    """In place of `weight`, where it is quantized."""

    def forward(self, x: Tensor) -> Tensor:
        return frozen_product(x, self.weight if self.matrix is None else self.matrix, self.bias)


class AdaptedLinear(FrozenLinear):
    """A linear layer of a base model with LoRA (arXiv 2106.09685) beside it."""

    def __init__(self, columns: int, rows: int, bias: bool, adapter: AdapterConfig) -> None:
        super().__init__(columns, rows, bias=bias)
        self.lora_A = Linear(columns, adapter.rank, bias=False)
        self.lora_B = Linear(adapter.rank, rows, bias=False)
        self.scaling = adapter.scaling
        self.drop: Callable[[Tensor], Tensor] = lambda x: x
        """What x goes through before A (`peer.model.dropout`)."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.lora_B(self.lora_A(self.drop(x))) * self.scaling
        return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply with weights that may be held in fewer bits than x; autocast casts by itself."""
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


def linear(config: ModelConfig, name: AdapterTarget, columns: int, rows: int, bias: bool = False) -> Linear:
    """Return the layer of a block that is called `name`, with an adapter if the model has one there."""
    if config.adapter is None:
        return Linear(columns, rows, bias=bias)
    if name in config.adapter.targets:
        return AdaptedLinear(columns, rows, bias, config.adapter)
    return FrozenLinear(columns, rows, bias=bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing, as in Linear."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, in fp32 where the table has fewer bits. One that is trained is widened as a whole:
        else its gradient would be the sum over equal ids in these few bits."""
        if self.weight.dtype.itemsize >= torch.float32.itemsize:
            return super().forward(ids)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return F.embedding(ids, self.weight.float())
        return F.embedding(ids, self.weight).float()


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.to(torch.promote_types(x.dtype, self.weight.dtype))  # of split weights it has fewer bits
        return F.rms_norm(x, gain.shape, gain, self.eps)


def _add_gradient(total: Tensor, parameter: Tensor) -> None:
    """Move the gradient of a parameter to a sum."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    total.add_(gradient)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.grouped = config.heads != config.kv_heads
        q_rows, kv_rows = config.heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = linear(config, "q_proj", config.hidden_size, q_rows, config.attention_bias)
        self.k_proj = linear(config, "k_proj", config.hidden_size, kv_rows, config.attention_bias)
        self.v_proj = linear(config, "v_proj", config.hidden_size, kv_rows, config.attention_bias)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.o_proj = linear(config, "o_proj", q_rows, config.hidden_size, config.output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        per_head = (batch, length, -1, self.head_size)
        q = self.q_norm(self.q_proj(x).view(per_head)).transpose(1, 2)  # (B, H, T, D), as the kernel needs it
        k = self.k_norm(self.k_proj(x).view(per_head)).transpose(1, 2)  # (B, K, T, D)
        v = self.v_proj(x).view(per_head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config, "gate_proj", config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config, "up_proj", config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config, "down_proj", config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Decoder(nn.Module):
    """The blocks `span` of the model (None: all), with parameters that are views into `flat`.

    `flat` is fp32 or bf16, (`FlatLayout.of(config, span).numel`,), on the device that computes. The first span takes
    token ids (B, T) int64, any other the hidden state (B, T, C). The last span returns logits (B, T, V), any
    other the hidden state. Raises ValueError for a part of a model with a tied head, which needs the embedding
    (`peer.model.layout.untie` makes a separate head), and for a span that splits blocks with shared parameters.

    With `config.adapter` the parameters are the adapter's, and `base` holds those of the base model (of the span:
    `frozen_shapes`), which get no gradient. A tied one may be cut.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: ModelConfig, flat: Tensor, span: Span | None = None, base: FrozenWeights | None = None
    ) -> None:
        super().__init__()
        span = Span.whole(config.layers) if span is None else span
        if span.of != config.layers:
            raise ValueError(f"the blocks {span} belong to another model than one of {config.layers} blocks")
        if span.first % config.shared_blocks or span.end % config.shared_blocks:
            raise ValueError(f"{span} splits blocks that share their parameters by {config.shared_blocks}")
        first, last = span.is_first, span.is_last
        if config.tie_embeddings and not (first and last) and config.adapter is None:
            raise ValueError("a model with tied embeddings is one stage: set tie_embeddings = false to split it")
        self.config, self.span = config, span
        self.recompute: Recompute = "none"  # it changes no value but the last bits
        self.loss_weight = 1.0
        """The gradient that the next sum of losses will get, above 0, for products in fp16 (`head_losses`)."""
        self.marked = False
        """Whether tokens have marks (`peer.model.marks`)."""
        self.samples: Tensor | None = None
        """The number of the sample in each row (B,) int64, on the CPU, for dropout; None: nothing is dropped."""
        with torch.device("meta"):  # shapes only: the storage is `flat`
            embeds = first or (last and config.tie_embeddings)
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size) if embeds else None
            self.layers = nn.ModuleDict({str(index): Block(config) for index in span.blocks[:: config.shared_blocks]})
            self.norm = RMSNorm(config.hidden_size, config.norm_eps) if last else None
            untied = last and not config.tie_embeddings
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False) if untied else None
        self.layout = FlatLayout.of(config, span)
        if config.adapter is not None:
            self._freeze(base or {})
            if config.adapter.dropout:
                self._drop(config.adapter.dropout)
        self.bind(flat)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos.to(flat.device), persistent=False)
        self.register_buffer("sin", sin.to(flat.device), persistent=False)

    def bind(self, flat: Tensor) -> None:
        """Make every parameter a view into `flat`."""
        for name, view in self.layout.views(flat).items():
            self._set(name, nn.Parameter(view))
        self.flat = flat

    def _freeze(self, base: FrozenWeights) -> None:
        """Take the parameters of a base model by name. Raises ValueError for one that is missing or of another
        shape."""
        for name, shape in frozen_shapes(self.config, self.span.blocks):
            value = base.get(name)
            if value is None or value.shape != shape:
                found = "missing" if value is None else f"of shape {tuple(value.shape)}"
                raise ValueError(f"the base's {name} is {found}, where the model needs {shape}")
            if not isinstance(value, Tensor):
                layer = self.get_submodule(name.removeprefix("model.").removesuffix(".weight"))
                assert isinstance(layer, FrozenLinear)
                layer.register_parameter("weight", None)
                layer.matrix = value
                continue
            wide = value.float() if value.dim() == 1 else value  # gains and biases: they are added to fp32
            self._set(name, nn.Parameter(wide, requires_grad=False))

    def _drop(self, rate: float) -> None:
        """Drop values before each A, by its layer's name and `samples`."""
        from peer.model.dropout import drop

        def dropped(layer: str, x: Tensor) -> Tensor:
            return x if self.samples is None else drop(x, self.samples, layer, rate)

        for name, layer in self.named_modules():
            if isinstance(layer, AdaptedLinear):
                layer.drop = partial(dropped, name)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, leaf = name.removeprefix("model.").rpartition(".")
        setattr(self.get_submodule(owner), leaf, parameter)

    def point_to(self, flat: Tensor) -> None:
        """Let the parameters view `flat`, as long and on the same device as the vector that they are bound to."""
        views = self.layout.views(flat)
        for name, parameter in self.canonical_parameters():
            parameter.data = views[name]

    def bind_gradients(self, flat_gradient: Tensor) -> None:
        """Make every gradient a view into `flat_gradient`; clear it with `zero_()`, never by setting it to None.
        Gradients of parameters in another type are added to it as they come, and freed: call this once for these."""
        views = self.layout.views(flat_gradient)
        for name, parameter in self.canonical_parameters():
            if parameter.dtype == flat_gradient.dtype:
                parameter.grad = views[name]
            else:
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient, views[name]))

    def canonical_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that are trained, with their canonical names."""
        return [
            (name if name.startswith("lm_head") else f"model.{name}", parameter)
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the last span, of any other the hidden state (B, T, C)."""
        x = self.hidden(x)
        return x if self.norm is None else _product(x, self.head)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden state (B, T, C) after the last block of the span, of the last span normalized."""
        length = x.shape[1]
        if length > self.config.max_seq_len:
            raise ValueError(f"{length} tokens exceed max_seq_len ({self.config.max_seq_len}): send fewer")
        if self.span.is_first:
            assert self.embed_tokens is not None
            x = self.embed_tokens(x)  # (B, T) -> (B, T, C)
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.layers.values():
            for _ in range(self.config.shared_blocks):
                x = run_block(block, self.recompute, x, cos, sin)
        return x if self.norm is None else self.norm(x)

    @property
    def head(self) -> Tensor:
        """The head's weights (V, C), for the last span only: its own, or the embedding's."""
        owner = self.embed_tokens if self.lm_head is None else self.lm_head
        assert owner is not None
        return owner.weight

    def losses(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, which has a gradient, and the losses (B, T) in nats a token, which have none,
        of `hidden` (B, T, C), as `hidden()` returned it, for targets (B, T). Logits exist a part at a time."""
        flat = hidden.flatten(0, 1)
        total, losses = head_losses(flat, self.head, targets.flatten(), marked=self.marked, weight=self.loss_weight)
        return total, losses.view(targets.shape)

    def inputs_of(self, tokens: Tensor) -> Tensor:
        """Return the ids (B, T) that tokens (B, T+1) begin with."""
        return ids_of(tokens[:, :-1]) if self.marked else tokens[:, :-1]


def run_block(block: Callable[..., Tensor], recompute: Recompute, *inputs: Tensor) -> Tensor:
    """Return the block's output. For the backward it keeps everything ("none"), the outputs of matrix products and of
    the attention ("selective", arXiv 2205.05198), or its inputs alone ("full", arXiv 1604.06174)."""
    if recompute == "none" or not torch.is_grad_enabled():
        return block(*inputs)
    contexts: dict[str, Any] = {}
    if recompute == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)
    out: Tensor = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)
    return out
