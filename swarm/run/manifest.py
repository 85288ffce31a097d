"""A run's constitution: what its author writes (RUN.toml) and what its authority signs (the manifest).

A run is named by the hash of its manifest, so nobody can change a rule without founding another run. The manifest holds
what every peer must agree on and nothing local: no paths but the data folder's, which each peer may override.
"""

from __future__ import annotations

from base64 import b32encode
from itertools import pairwise
from typing import Final, Literal

import msgspec
from blake3 import blake3

from optim.config import AllReduceConfig, CodecConfig, DilocoConfig, OuterConfig, SparseLocoConfig
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, is_peer_id, open_body, sign_body
from swarm.protocol.head import Head, genesis
from swarm.protocol.plan import RANGES_MAX

PROTOCOL_VERSION: Final = 6
MANIFEST_BYTES_MAX: Final = 64 << 10
TOKENIZER_BYTES_MAX: Final = 64 << 20
BYTES_TOKENIZER: Final = "bytes"
RUN_ID_BYTES: Final = 20
STAGES_MAX: Final = 1024
LAYERS_MAX: Final = 1 << 14
PARAMETERS_MAX: Final = 1 << 40

_KIND: Final = "manifest"


class RunRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who takes part and for how long. `rounds` 0 means for ever; `timeout_floor_s` 0 means deadlines adapt to what is
    measured; above 0 it is a floor under them (the only deadline a user sets)."""

    name: str
    open: bool = True
    min_peers: int = 2
    max_peers: int = 64
    rounds: int = 0
    seed: int = 0
    timeout_floor_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 64 or not self.name.isprintable():
            raise ValueError("name must have 1 to 64 printable characters")
        if not 1 <= self.min_peers <= self.max_peers:
            raise ValueError(f"min_peers is {self.min_peers}: it must lie between 1 and max_peers ({self.max_peers})")
        if self.max_peers > 1024:
            raise ValueError(f"max_peers is {self.max_peers}: one group holds at most 1024")
        if self.rounds < 0:
            raise ValueError(f"rounds is {self.rounds}: give 0 (for ever) or more")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}: it must lie between 0 and 2**63 - 1")
        if not 0 <= self.timeout_floor_s <= 3600:
            raise ValueError(f"timeout_floor_s is {self.timeout_floor_s}: it must lie between 0 (adaptive) and 3600")


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`source`: "bytes", or the path of a `tokenizer.json` or of a folder that holds one."""

    source: str = BYTES_TOKENIZER


class PipelineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Into how many `stages` the model is cut; with 1 every peer holds all of it and the rest means nothing.

    `micro_batch`: sequences that travel together, 0 for as many as [inner] batch_size. `activations`: how hidden states
    and their gradients cross the wire ("none": fp32). `recompute`: a stage keeps only the input of a micro-batch that
    waits for its gradient and computes the rest again: less memory, a third more work.
    """

    stages: int = 1
    micro_batch: int = 0
    activations: Literal["int8", "int4", "fp16", "none"] = "int8"
    recompute: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= STAGES_MAX:
            raise ValueError(f"stages is {self.stages}: it must lie between 1 (no pipeline) and {STAGES_MAX}")
        if not 0 <= self.micro_batch <= 1 << 20:
            raise ValueError(f"micro_batch is {self.micro_batch}: give a number of sequences, or 0")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The agreed rules of one run. `cuts` are the blocks of each stage, (first, past the last), and `genesis` the state
    hash of round 0 of each; `tokenizer` is "bytes" or the hex blake3 of the run's tokenizer.json, `authority` the peer
    id that signs, `created_at` seconds since the Unix epoch.

    The replicas of one stage are a *group*: they have rounds, heads and a state of their own, under the group's id.
    """

    protocol: int
    authority: str
    created_at: int
    run: RunRules
    model: ModelConfig
    tokenizer: str
    data: DataConfig
    inner: InnerConfig
    outer: OuterConfig
    codec: CodecConfig
    pipeline: PipelineConfig
    cuts: tuple[tuple[int, int], ...]
    genesis: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not is_peer_id(self.authority):
            raise ValueError("authority is not the id of an Ed25519 peer")
        if len(self.genesis) != self.pipeline.stages or any(len(root) != 32 for root in self.genesis):
            raise ValueError("genesis is not a hash of 32 bytes for each stage")
        if self.tokenizer != BYTES_TOKENIZER and len(self.tokenizer) != 64:
            raise ValueError("tokenizer is neither bytes nor a hash")
        check_fit(self.model, self.data, self.tokenizer)
        check_pipeline(self.pipeline, self.model, self.inner, self.outer)
        ends = [0, *(end for _, end in self.cuts)]
        whole = [*pairwise(ends)] == [*self.cuts] and all(first < end for first, end in self.cuts)
        if not whole or len(self.cuts) != self.pipeline.stages or ends[-1] != self.model.layers:
            raise ValueError("cuts are not the blocks of each stage, one after the other")
        if any(end % self.model.shared_blocks for end in ends):
            raise ValueError("cuts part blocks that share their parameters")

    @property
    def run_id(self) -> str:
        """32 characters that name the run: base32 of a 160-bit hash of everything above."""
        return run_id_text(blake3(msgspec.msgpack.encode(self)).digest(RUN_ID_BYTES))

    @property
    def stages(self) -> int:
        """How many stages, and so groups, there are; 1 if every peer holds the whole model."""
        return len(self.cuts)

    @property
    def groups(self) -> tuple[str, ...]:
        """The group id of each stage: what the heads of its replicas call their run. Of one stage, the run's id."""
        run_id = self.run_id
        if self.stages == 1:
            return (run_id,)
        named = (blake3(f"{run_id}/{stage}".encode()).digest(RUN_ID_BYTES) for stage in range(self.stages))
        return tuple(map(run_id_text, named))

    def group_id(self, stage: int) -> str:
        """The id of the group of `stage`."""
        return self.groups[stage]

    def first_head(self, stage: int = 0) -> Head:
        """Round 0 of the group of `stage`."""
        return genesis(self.group_id(stage), self.genesis[stage])

    @property
    def micro_batch(self) -> int:
        """Sequences of one micro-batch."""
        return micro_batch_of(self.pipeline, self.inner)

    @property
    def synchronous(self) -> bool:
        """Whether the weights change at commits only (all replicas of a stage make one step together), not also in
        between."""
        return isinstance(self.outer, AllReduceConfig)


def check_fit(model: ModelConfig, data: DataConfig, tokenizer: str) -> None:
    """What no section can check alone; raises ValueError."""
    if data.seq_len > model.max_seq_len:
        raise ValueError(f"seq_len is {data.seq_len}: the model's max_seq_len is only {model.max_seq_len}")
    if tokenizer == BYTES_TOKENIZER and model.vocab_size < 256:
        raise ValueError(f"vocab_size is {model.vocab_size}: the byte tokenizer needs at least 256")
    if model.layers > LAYERS_MAX:
        raise ValueError(f"layers is {model.layers}: it must not be above {LAYERS_MAX}")
    attention = 2 * (model.heads + model.kv_heads) * model.head_size
    block = model.hidden_size * (attention + 3 * model.intermediate_size)
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size
    parameters = embeddings + model.layers // model.shared_blocks * block
    if parameters > PARAMETERS_MAX:  # gains and biases, left out, are few beside these
        raise ValueError(
            f"hidden_size is {model.hidden_size}: with the other sizes that makes {parameters:.1e} parameters,"
            f" and no run can have more than {PARAMETERS_MAX:.1e}"
        )


def micro_batch_of(pipeline: PipelineConfig, inner: InnerConfig) -> int:
    """Sequences of one micro-batch."""
    return pipeline.micro_batch or inner.batch_size


def check_pipeline(pipeline: PipelineConfig, model: ModelConfig, inner: InnerConfig, outer: OuterConfig) -> None:
    """What a pipeline asks of the other sections; raises ValueError that begins with the field's name."""
    if pipeline.stages == 1:
        return
    most = model.layers // model.shared_blocks
    if pipeline.stages > most:
        blocks = "blocks" if model.shared_blocks == 1 else f"blocks, {model.shared_blocks} of which share parameters,"
        raise ValueError(
            f"stages is {pipeline.stages}: the model's {model.layers} {blocks} make at most {most}"
            f" stage{'' if most == 1 else 's'}; lower stages, or take a model of more layers"
        )
    if model.tie_embeddings:
        raise ValueError("tie_embeddings is true: a pipeline's head is not where its embedding is; set it to false")
    if not isinstance(outer, DilocoConfig | SparseLocoConfig | AllReduceConfig):
        method = outer.__struct_config__.tag
        raise ValueError(f"method is {method!r}: with stages > 1 choose diloco, sparseloco or allreduce")
    size = micro_batch_of(pipeline, inner)
    whole, samples = "[inner] batch_size", inner.batch_size
    if isinstance(outer, AllReduceConfig):
        whole, samples = "[outer] batch", outer.batch
    meaning = "" if pipeline.micro_batch else f" (as [inner] batch_size, {size})"
    if samples % size:
        raise ValueError(f"micro_batch is {pipeline.micro_batch}{meaning}: it must divide {whole} ({samples})")
    if isinstance(outer, AllReduceConfig) and samples // size > RANGES_MAX:
        raise ValueError(
            f"micro_batch is {pipeline.micro_batch}{meaning}: {whole} ({samples}) has {samples // size} of them, more"
            f" than the {RANGES_MAX} of which one message can tell; raise it, or lower {whole}"
        )


def sign_manifest(identity: Identity, manifest: Manifest) -> Signed:
    """The authority's signature; ValueError if `identity` is not the authority that the manifest names."""
    if identity.peer_id != manifest.authority:
        raise ValueError("the manifest names another authority than the signer")
    return sign_body(identity, _KIND, manifest)


def open_manifest(signed: Signed, run_id: str | None = None) -> Manifest:
    """Check what a peer or a file handed over as a run's manifest.

    Raises ProtocolViolation if it is forged or malformed, NotAdmitted if it is sound but of another protocol version
    or (given `run_id`) of another run.
    """
    if len(signed.body) > MANIFEST_BYTES_MAX:
        raise ProtocolViolation(f"the manifest is larger than {MANIFEST_BYTES_MAX} bytes")
    preamble = open_body(signed, _KIND, _Preamble)  # first: another version may have other fields
    check_protocol(preamble.protocol)
    manifest = open_body(signed, _KIND, Manifest, signer=preamble.authority)
    if run_id is not None:
        check_run(manifest, run_id)
    return manifest


def check_protocol(version: int) -> None:
    """NotAdmitted if the other side speaks another version of the protocol."""
    if version == PROTOCOL_VERSION:
        return
    side = "this machine" if version > PROTOCOL_VERSION else "the other side"
    raise NotAdmitted(
        f"the run speaks protocol version {version} and this software version {PROTOCOL_VERSION}:"
        f" upgrade barnraise on {side}."
    )


def check_run(manifest: Manifest, run_id: str) -> None:
    """NotAdmitted if `run_id` names another run than the manifest's."""
    if manifest.run_id != run_id:
        raise NotAdmitted(
            f"that peer belongs to run {manifest.run_id}, not to {run_id}: ask for an invite to the right run."
        )


class _Preamble(msgspec.Struct, frozen=True):
    """What every version of the manifest has."""

    protocol: int
    authority: str


def run_id_text(raw: bytes) -> str:
    """The 32-character form of a run id."""
    return b32encode(raw).decode().lower()
