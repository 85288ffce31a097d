"""A range of a model's blocks, fused for inference: Llama, Mistral, Qwen2 and Qwen3.

Shapes: N tokens of all segments together, C hidden_size, H query heads, K key/value heads, G = H / K, D head_size,
V vocab_size. A step computes segments, each some tokens of one session: one token while it generates, many of its
prompt. The matrices see all of them at once, attention each session by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.config import AdapterConfig, ModelConfig, Quantization
from peer.inference.adapters import AdaptedRows, BlockAdapter
from peer.inference.cache import SessionCache
from peer.ipc.span import Span
from peer.model.matrices import Matrix, PlainMatrix, TensorSource, load_matrix
from peer.model.rotary import rotary_table


@dataclass(frozen=True)
class Segment:
    """`count` tokens of a session, which begin at `position`. Its cache has room for them."""

    cache: SessionCache
    position: int
    count: int
    adapter: int | None = None
    """The number of its adapter; None: it has none."""


@dataclass(frozen=True)
class _Block:
    """The parameters of one block, those that are multiplied with the same input in one matrix. Where a norm's gain is
    None, the matrix after it has it, times sqrt(C): its factor in `gains`."""

    dtype: torch.dtype
    """Of its hidden states."""
    attention_norm: Tensor | None
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Matrix
    down: Matrix
    gains: Mapping[str, Tensor | None]

    @classmethod
    def load(cls, config: ModelConfig, index: int, source: TensorSource, quantization: Quantization | None) -> _Block:
        at = f"model.layers.{index - index % config.shared_blocks}."
        attention, mlp = at + "self_attn.", at + "mlp."
        joined = [f"{attention}{name}_proj" for name in "qkv"]

        def matrix(*names: str, columns: int = config.hidden_size) -> Matrix:
            return load_matrix(source, [f"{name}.weight" for name in names], columns, quantization)

        gate_up = matrix(mlp + "gate_proj", mlp + "up_proj")
        gain, mlp_gain = source(at + "input_layernorm.weight"), source(at + "post_attention_layernorm.weight")
        attention_norm, qkv = _folded(gain, matrix(*joined))
        mlp_norm, gate_up = _folded(mlp_gain, gate_up)
        return cls(
            dtype=gain.dtype,
            attention_norm=attention_norm,
            qkv=qkv,
            qkv_bias=torch.cat([source(f"{name}.bias") for name in joined]) if config.attention_bias else None,
            q_norm=source(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=source(attention + "k_norm.weight") if config.qk_norm else None,
            out=matrix(attention + "o_proj", columns=config.heads * config.head_size),
            out_bias=source(attention + "o_proj.bias") if config.output_bias else None,
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=matrix(mlp + "down_proj", columns=config.intermediate_size),
            gains={
                "qkv": _factor(gain) if attention_norm is None else None,
                "gate_up": _factor(mlp_gain) if mlp_norm is None else None,
            },
        )


def _folded(gain: Tensor, matrix: Matrix) -> tuple[Tensor | None, Matrix]:
    """Return the rest of a norm's gain, and the matrix (M, C) after it. In fp32 the matrix takes the gain; in shorter
    types it would be rounded once more."""
    if not isinstance(matrix, PlainMatrix) or matrix.weight.dtype != torch.float32:
        return gain, matrix
    return None, PlainMatrix(matrix.weight * _factor(gain))


def _factor(gain: Tensor) -> Tensor:
    factor: Tensor = gain * len(gain) ** 0.5
    return factor


@dataclass(frozen=True)
class _Turn:
    """The rotary embedding of the tokens of one step, for queries, keys and values (N, H + 2K, D) in fp32: x cos +
    swapped(x) sin, where swapped exchanges the halves. Queries are scaled by D^-1/2, values stay."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin).to(x.dtype)


class SpanBlocks:
    """The blocks of `span`. The first span takes token ids (N,) int64, any other the hidden state (N, C)."""

    def __init__(
        self,
        config: ModelConfig,
        span: Span,
        source: TensorSource,
        device: torch.device,
        window: int | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """`source` gives parameters in the type to compute in, quantized matrices as they are stored. `window`: how
        many tokens a token sees, itself included; None for all."""
        self.config, self.span, self.window = config, span, window
        self._heads, self._kv_heads, self._size = config.heads, config.kv_heads, config.head_size

        def placed(name: str) -> Tensor:
            return source(name).to(device)

        self._blocks = [_Block.load(config, index, placed, quantization) for index in span.blocks]
        self.dtype = self._blocks[0].dtype
        """The type of hidden states."""
        embedding = "model.embed_tokens.weight"
        self._embedding = placed(embedding) if span.is_first else None
        self._norm: Tensor | None = placed("model.norm.weight") if span.is_last else None
        tied = config.tie_embeddings
        self._head: Matrix | None = None
        if span.is_last:
            shared = self._embedding if tied else None
            self._head = PlainMatrix(shared if shared is not None else placed(embedding if tied else "lm_head.weight"))
            if not tied:
                self._norm, self._head = _folded(placed("model.norm.weight"), self._head)
        cos, sin = rotary_table(config)
        self._cos = torch.cat((cos, cos), dim=-1).to(device)  # (T, D)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)
        heads, kv_heads = config.heads, config.kv_heads
        turned = [config.head_size**-0.5] * heads + [1.0] * kv_heads + [0.0] * kv_heads
        self._turned = torch.tensor(turned, device=device).unsqueeze(1)  # (H + 2K, 1)
        self._kept = torch.tensor([0.0] * (heads + kv_heads) + [1.0] * kv_heads, device=device).unsqueeze(1)
        self._floor = torch.tensor((config.hidden_size * config.norm_eps) ** 0.5, device=device)
        self._adapters: list[list[BlockAdapter]] = []

    def add_adapter(self, adapter: AdapterConfig, source: TensorSource) -> None:
        """Let sessions use another adapter, whose number is that of those before it. `source` gives its tensors."""
        blocks = zip(self.span.blocks, self._blocks, strict=True)
        self._adapters.append(
            [BlockAdapter.load(self.config, adapter, at, source, self.device, block.gains) for at, block in blocks]
        )

    @property
    def adapters(self) -> int:
        """The number of adapters."""
        return len(self._adapters)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._cos.device

    @torch.inference_mode()
    def forward(self, x: Tensor, segments: Sequence[Segment], part: Span | None = None) -> Tensor:
        """Return the hidden state (N, C) behind `part` of the span (None: all of it), before the final norm; `x`, as
        the class says of a span, holds the segments' tokens one after the other. Keys and values go into the caches,
        whose lengths stay as they are."""
        part = self.span if part is None else part
        if part.is_first:
            assert self._embedding is not None
            x = F.embedding(x, self._embedding)
        turn = self._turn(segments)
        masks, adapted = [self._mask(segment) for segment in segments], _adapted_rows(segments)
        for layer in range(part.first - self.span.first, part.end - self.span.first):
            block = self._blocks[layer]
            rows = AdaptedRows([(at, self._adapters[adapter][layer]) for at, adapter in adapted])
            attended = self._attend(layer, block, self._normed(x, block.attention_norm), turn, segments, masks, rows)
            x = block.out.times(attended, x if block.out_bias is None else x + block.out_bias)
            x = rows.add("out", attended, x)
            normed = self._normed(x, block.mlp_norm)
            gate, up = rows.add("gate_up", normed, block.gate_up.times(normed)).chunk(2, dim=-1)
            inner = F.silu(gate) * up
            x = rows.add("down", inner, block.down.times(inner, x))
        return x.contiguous()

    def _turn(self, segments: Sequence[Segment]) -> _Turn:
        """Return the rotary embedding of these tokens."""
        places = [at for s in segments for at in range(s.position, s.position + s.count)]
        at = torch.tensor(places, device=self.device)
        cos, sin = self._cos[at].unsqueeze(1), self._sin[at].unsqueeze(1)  # (N, 1, D)
        return _Turn(torch.addcmul(self._kept, cos, self._turned), sin * self._turned)

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (N, V), fp32, of hidden states (N, C) after the last block."""
        assert self._head is not None
        return self._head.times(self._normed(x, self._norm)).float()

    def _normed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """Return RMSNorm (1910.07467) of x (N, C); without a gain, divided by sqrt(C)."""
        if gain is not None:
            return F.rms_norm(x, gain.shape, gain, self.config.norm_eps)
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)

    def _attend(
        self,
        layer: int,
        block: _Block,
        x: Tensor,
        turn: _Turn,
        segments: Sequence[Segment],
        masks: Sequence[Tensor | None],
        rows: AdaptedRows,
    ) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        joined = rows.add("qkv", x, block.qkv.times(x))
        if block.qkv_bias is not None:
            joined = joined + block.qkv_bias
        qkv = joined.view(len(x), heads + 2 * kv_heads, self._size)
        if block.q_norm is not None and block.k_norm is not None:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
            qkv = torch.cat((self._normed(q, block.q_norm), self._normed(k, block.k_norm), v), dim=1)
        turned = turn(qkv)
        found, start = [], 0
        for segment, mask in zip(segments, masks, strict=True):
            end = start + segment.count
            found.append(self._attend_segment(layer, segment, mask, turned[start:end]))
            start = end
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend_segment(self, layer: int, segment: Segment, mask: Tensor | None, qkv: Tensor) -> Tensor:
        """Attend one session: qkv (count, H + 2K, D), queries scaled. Return (count, H·D)."""
        heads, kv_heads, first = self._heads, self._kv_heads, 0
        end = segment.position + segment.count
        room = segment.cache.stretch[layer].flatten(0, 1)  # (2K, tokens, D)
        if segment.count == 1:
            room[:, segment.position] = qkv[0, heads:]
            if self.window is not None:
                first = max(0, end - self.window)
            query = qkv[0, :heads].view(kv_heads, -1, self._size)  # (K, G, D)
            scores = torch.bmm(query, room[:kv_heads, first:end].transpose(1, 2))
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(qkv.dtype)
            return torch.bmm(weights, room[kv_heads:, first:end]).view(1, -1)
        room[:, segment.position : end] = qkv[:, heads:].transpose(0, 1)
        y = F.scaled_dot_product_attention(
            qkv[:, :heads].transpose(0, 1).unsqueeze(0),
            room[:kv_heads, :end].unsqueeze(0),
            room[kv_heads:, :end].unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=1.0,
            enable_gqa=heads != kv_heads,
        )
        return y[0].transpose(0, 1).reshape(segment.count, -1)

    def _mask(self, segment: Segment) -> Tensor | None:
        """Return which tokens each one sees (count, end); None where the plain causal mask is right."""
        end = segment.position + segment.count
        windowed = self.window is not None and end > self.window
        if segment.count == 1 or (segment.position == 0 and not windowed):
            return None
        at = torch.arange(segment.position, end, device=self._cos.device).unsqueeze(1)
        seen = torch.arange(end, device=self._cos.device).unsqueeze(0)
        mask = seen <= at
        return mask & (seen > at - self.window) if self.window is not None else mask


def _adapted_rows(segments: Sequence[Segment]) -> list[tuple[slice, int]]:
    """Return the rows of neighbouring segments with one adapter, and its number."""
    found, start = list[tuple[slice, int]](), 0
    for segment in segments:
        end = start + segment.count
        if segment.adapter is not None:
            if found and found[-1][1] == segment.adapter and found[-1][0].stop == start:
                found[-1] = (slice(found[-1][0].start, end), segment.adapter)
            else:
                found.append((slice(start, end), segment.adapter))
        start = end
    return found
